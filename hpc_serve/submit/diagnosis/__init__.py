"""Chooses the logs that are read for the cause of a failure, and writes bug reports. `diagnose/` names the cause."""
