"""Slurm's words and answers, and the programs that carry a script to it."""
