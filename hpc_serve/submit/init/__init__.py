"""What `hpc-serve init` finds out of a cluster, and the site file that it makes of it.

`look` asks the machine and Slurm; all else is pure. `slurm_facts` and `machine_facts` read what the commands print, as
the values of `facts`; `gpu_names` says which accelerator of the catalogue a GPU of Slurm's is; `choose` and `places`
make settings of facts, each with its reason; `site_text` writes them.
"""
