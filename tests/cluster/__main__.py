"""The cluster for people, as root: python -m tests.cluster up | status | run [-- COMMAND] | down"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hpc_serve.demo_model import SHAPES, make_demo_model
from tests.cluster import ClusterConfig, ClusterError, SlurmCluster
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment, visible_folders

SIZES = ("num_nodes", "gpus_per_node", "cpus_per_node")


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "up":
            sizes = {key: value for key, value in vars(options).items() if key in SIZES}
            _up(SlurmCluster(ClusterConfig(name=options.name, visible=visible_folders(), **sizes)))
            return 0
        cluster = SlurmCluster.named(options.name)
        if options.command == "down":
            cluster.down()
        elif options.command == "status":
            print(cluster.run(["sinfo", "--Node", "--long"], user="root").stdout)
            print(cluster.run(["squeue", "--long"], user="root").stdout)
            print("\n".join(map(str, cluster.processes())))
        else:
            cluster.job_env = user_environment()
            cluster.shell(options.argv or ["bash"], user=options.user, node=options.node, cwd=options.cwd)
    except ClusterError as error:
        print(f"tests.cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default=ClusterConfig().name, help="which cluster (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the cluster up; quick if it is up already")
    for size in SIZES:
        up.add_argument(f"--{size.replace('_', '-')}", type=int, default=getattr(ClusterConfig(), size))
    commands.add_parser("down", help="end and remove everything of the cluster")
    commands.add_parser("status", help="show the nodes, the queue and the users' processes")
    run = commands.add_parser("run", help="run a command on the cluster; a shell if none is given")
    run.add_argument("--user", default="alice", help="alice, mallory or root (default: %(default)s)")
    run.add_argument("--node", help="a compute node in place of the login node")
    run.add_argument("--cwd", help="where it runs (default: the user's home)")
    run.add_argument("argv", nargs="*", metavar="COMMAND")
    return parser


def _up(cluster: SlurmCluster) -> None:
    cluster.up()
    models = cluster.shared / "models"
    for like in SHAPES:
        if not (models / like).exists():
            make_demo_model(models / like, like=like)
    sudo = "sudo " if "SUDO_UID" in os.environ else ""
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    name = "" if cluster.config.name == ClusterConfig().name else f" --name {cluster.config.name}"
    command = f"{sudo}{python} -m tests.cluster{name}"
    print(f"""\
The cluster {cluster.config.name} is up: login, {", ".join(cluster.nodes)}; users {", ".join(cluster.config.users)}.

Become alice on the login node (Slurm's commands, hpc-serve and vllm are there; no network but the cluster's):

    {command} run

There, serve a tiny model in place of the large one's weights, and talk to it:

    export HPC_SERVE_MODEL={models}/8b
    sbatch {CHECKOUT}/sbatch/8b.sh
    hpc-serve wait 8b
    hpc-serve chat 8b "Hello"
    hpc-serve stop 8b

Likewise 70b (4 GPUs) and 405b (2 nodes x 8 GPUs). From here: `{command} status`.
Take it down, leaving nothing behind:

    {command} down""")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
