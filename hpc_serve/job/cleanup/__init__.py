"""Removes what dead runs of this user left on a node and in the home, and nothing else."""
