"""The commands `submit`, `render` and `demo`, and the options that they share with `plan`."""
