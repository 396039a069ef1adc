"""The cluster for people: `python -m tests.cluster up | status | run -- COMMAND | down`, as root."""

from __future__ import annotations

import argparse
import sys

from tests.cluster import ClusterConfig, ClusterError, SlurmCluster
from tests.cluster.config import LOGIN


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default=ClusterConfig().name, help="which cluster (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the cluster up; quick if it is up already")
    up.add_argument("--num-nodes", type=int, default=ClusterConfig().num_nodes)
    up.add_argument("--gpus-per-node", type=int, default=ClusterConfig().gpus_per_node)
    up.add_argument("--cpus-per-node", type=int, default=ClusterConfig().cpus_per_node)
    commands.add_parser("down", help="end and remove everything of the cluster")
    commands.add_parser("status", help="show the nodes, the queue and the users' processes")
    run = commands.add_parser("run", help="run a command on the cluster, or a shell")
    run.add_argument("--user", default="alice")
    run.add_argument("--node", help="a compute node instead of the login node")
    run.add_argument("--cwd", help="where it runs (default: the user's home)")
    run.add_argument("argv", nargs="*", metavar="COMMAND")
    options = parser.parse_args(arguments)

    sizes = {key: value for key, value in vars(options).items() if key in ClusterConfig.__annotations__}
    cluster = SlurmCluster(ClusterConfig(**sizes)) if options.command == "up" else SlurmCluster.named(options.name)
    try:
        if options.command == "up":
            cluster.up()
            print(f"cluster {cluster.config.name} is up: {LOGIN}, {', '.join(cluster.nodes)}")
        elif options.command == "down":
            cluster.down()
        elif options.command == "status":
            print(cluster.run(["sinfo", "--Node", "--long"], user="root").stdout)
            print(cluster.run(["squeue", "--long"], user="root").stdout)
            print("\n".join(map(str, cluster.processes())))
        else:
            argv = options.argv or ["/bin/bash", "--login"]
            cluster.shell(argv, user=options.user, node=options.node, cwd=options.cwd)
    except ClusterError as error:
        print(f"tests.cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
