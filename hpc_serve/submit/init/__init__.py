"""The facts that `hpc-serve init` finds about a cluster, and the site file that it makes of them.

`look` asks the machine and Slurm; all else is pure. `slurm_facts` and `machine_facts` turn the output of commands into
values of `facts`. `gpu_names` finds the catalogue's accelerator for a GPU name of Slurm. `choose` and `places` make
settings of facts, each with its reason; `setting` writes them as text.
"""
