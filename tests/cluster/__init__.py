"""A real Slurm of several hosts on one machine, for tests and for people to play with.

Each host (a login node and the compute nodes) is a set of Linux namespaces: own network, hostname, processes, /tmp and
/dev/shm. What runs on it is Slurm's own slurmctld, slurmd and munged; what tests do to it is in `SlurmCluster`.
"""

from tests.cluster.cluster import SlurmCluster, wait_for
from tests.cluster.config import ClusterConfig
from tests.cluster.hosts import ClusterError

__all__ = ["ClusterConfig", "ClusterError", "SlurmCluster", "wait_for"]
