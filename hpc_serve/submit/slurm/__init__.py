"""Slurm's commands and answers as values, the function that runs them, and submitit's executors for scripts."""
