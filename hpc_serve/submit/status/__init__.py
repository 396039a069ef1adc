"""Finds out how services are: from records, engines and Slurm, asked as seldom as possible."""
