"""`submit`, `render`, `demo`."""
