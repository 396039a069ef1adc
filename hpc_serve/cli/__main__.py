"""`python -m hpc_serve.cli`, where the `hpc-serve` command is not on PATH."""

from hpc_serve.cli.main import main

main()
