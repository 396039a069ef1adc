"""The commands `plan`, `gpus` and `models`. `plan/` makes the numbers."""
