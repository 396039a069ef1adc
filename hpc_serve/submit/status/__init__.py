"""How the replicas of services are, as records, engines and Slurm say it."""
