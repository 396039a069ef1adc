"""The program inside a job: one launcher on each node, which starts Ray and the engine and publishes their address.

It uses the standard library and filelock alone, so that it runs in any container that has a Python. It calls no Slurm
command.
"""
