"""`python -m hpc_serve.job --service NAME … -- vllm serve MODEL …`: what `srun` starts, once on each node."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from hpc_serve.errors import HpcServeError
from hpc_serve.job.launcher import launch
from hpc_serve.job.machine.allocation import Share, read_allocation, set_up_logging
from hpc_serve.job.run.node import LaunchOptions

_log = logging.getLogger("hpc_serve.job")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.job", description=__doc__)
    parser.add_argument("--service", required=True, help="name under which clients find it")
    parser.add_argument("--backend", choices=("auto", "ray", "mp"), default="auto")
    parser.add_argument("--replica", default="0/1", metavar="K/N", help="which of the replicas of the job, from 0")
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus-per-node", type=int, metavar="N", help="0: the engine runs on CPUs")
    devices.add_argument("--tpus-per-node", type=int, metavar="N", help="chips of each host")
    parser.add_argument(
        "--engine-restarts",
        type=int,
        default=LaunchOptions.engine_restarts,
        metavar="N",
        help="how often an engine that was ready is started again in place",
    )
    parser.add_argument("--preflight-only", action="store_true", help="look at the nodes, and start no engine")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- vllm serve MODEL …")
    arguments = parser.parse_args()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm may warn all processes by it; the engine inherits this
    set_up_logging(sys.stdout)  # where the engine's lines go, so that all stay in their order
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    allocation = None
    _log.info("launcher of %s begins", arguments.service)
    try:
        share = Share.from_text(arguments.replica)
        allocation = read_allocation(os.environ, share)
        num_devices = arguments.tpus_per_node or arguments.gpus_per_node or 0
        options = LaunchOptions(
            service=arguments.service,
            backend=arguments.backend,
            device="TPU" if arguments.tpus_per_node else "GPU",
            gpus_per_node=num_devices,
            engine_restarts=arguments.engine_restarts,
            preflight="only" if arguments.preflight_only else "on",
        )
        environ = share.narrow_devices(os.environ, needed=options.gpus_per_node if options.device == "GPU" else 0)
        share.take_cores()
        return launch(options, words, allocation, environ)
    except HpcServeError as error:
        _log.error("%s", error)
        if allocation is not None and allocation.is_head:
            from hpc_serve.job.run.record_keeper import publish_failure  # a worker has no record

            publish_failure(arguments.service, allocation, error, os.environ)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
