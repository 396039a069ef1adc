"""The program inside an allocation: one launcher a node, which starts Ray and the engine and says where they are.

It uses the standard library alone (so that it runs in any container with a Python) and calls no Slurm command.
"""
