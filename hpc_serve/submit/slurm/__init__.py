"""Slurm's commands and answers as values, the programs that ask Slurm, and submitit's executors for scripts."""
