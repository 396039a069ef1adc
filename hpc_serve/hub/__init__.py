"""Finds a model's config, files and weights, on this machine and on the hub. `plan/model/` says what a config means."""
