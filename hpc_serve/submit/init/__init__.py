"""The facts that `hpc-serve init` finds about a cluster, and the site file that it makes of them.

`look` asks the machine and Slurm; all else is pure. `facts` reads the output of commands as values. `choose` and
`places` make settings of facts, each with its reason; `places` writes them as text.
"""
