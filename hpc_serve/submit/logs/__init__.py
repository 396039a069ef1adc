"""The log files of a job, their lines, and the engine's reports in them over time."""
