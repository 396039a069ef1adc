"""`python -m hpc_serve.job --service NAME … -- vllm serve MODEL …`: what `srun` starts, once a node."""

from __future__ import annotations

import argparse
import os
import sys

from hpc_serve.errors import HpcServeError
from hpc_serve.job.launcher import launch
from hpc_serve.job.node import LaunchOptions


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.job", description=__doc__)
    parser.add_argument("--service", required=True, help="name under which clients find it")
    parser.add_argument("--backend", choices=("auto", "ray", "mp"), default="auto")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--stall-s", type=float, default=float(os.environ.get("HPC_SERVE_STALL_S") or 1_800))
    parser.add_argument("--join-s", type=float, default=float(os.environ.get("HPC_SERVE_JOIN_S") or 300))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- vllm serve MODEL …")
    arguments = parser.parse_args()
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    options = LaunchOptions(
        service=arguments.service,
        backend=arguments.backend,
        gpus_per_node=arguments.gpus_per_node,
        stall_s=arguments.stall_s,
        join_s=arguments.join_s,
    )
    try:
        return launch(options, words, dict(os.environ))
    except HpcServeError as error:
        print(f"hpc-serve: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
