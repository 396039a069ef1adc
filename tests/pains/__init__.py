"""What goes wrong most for people who run vLLM and Ray on Slurm: each brought about here, and what is said of it.

Run as a program: python -m tests.pains. It is no part of `make test`, which has the same causes as cases of real logs.
"""
