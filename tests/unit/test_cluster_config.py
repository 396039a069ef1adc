from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.config import (
    ClusterConfig,
    accounts_text,
    gres_conf_text,
    hosts_text,
    slurm_conf_text,
)
from tests.cluster.hosts import python_paths

CONFIG = ClusterConfig(name="two", num_nodes=2, cpus_per_node=8, memory_per_node_mib=16000, root=Path("/srv/clusters"))


def test_every_host_has_its_own_address() -> None:
    assert [CONFIG.address(host) for host in CONFIG.hosts] == ["10.77.0.10", "10.77.0.11", "10.77.0.12"]
    assert "10.77.0.12 n2" in hosts_text(CONFIG).splitlines()


def test_slurm_conf_declares_the_nodes_and_their_gpus() -> None:
    lines = slurm_conf_text(CONFIG).splitlines()
    assert "SlurmctldHost=login(10.77.0.10)" in lines
    assert ("NodeName=n2 NodeAddr=10.77.0.12 CPUs=8 RealMemory=16000 Gres=gpu:h100:8 State=UNKNOWN") in lines
    assert "DefMemPerCPU=2000" in lines
    assert "File=/srv/clusters/two/dev/gpu[0-7]" in gres_conf_text(CONFIG)


def test_low_priority_jobs_give_way() -> None:
    partitions = [line for line in slurm_conf_text(CONFIG).splitlines() if line.startswith("PartitionName=")]
    assert [line.split()[0] for line in partitions] == ["PartitionName=gpu", "PartitionName=lowprio"]
    assert "PriorityTier=1 PreemptMode=REQUEUE" in partitions[1]


def test_accounts_keep_the_machine_s_and_add_ours() -> None:
    machine = "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/zsh\n"
    assert accounts_text(CONFIG, machine, 61000, group=False).splitlines() == [
        "root:x:0:0:root:/root:/bin/bash",
        "alice:x:61000:61000::/srv/clusters/two/home/alice:/bin/bash",
        "mallory:x:61001:61001::/srv/clusters/two/home/mallory:/bin/bash",
    ]
    assert accounts_text(CONFIG, "root:x:0:\n", 61000, group=True).splitlines()[1:] == [
        "alice:x:61000:",
        "mallory:x:61001:",
        "project:x:61002:alice,mallory",
    ]


def test_settings_survive_their_file() -> None:
    assert ClusterConfig.from_json(CONFIG.to_json()) == CONFIG
    other = replace(CONFIG, os_root=Path("/srv/debian"))
    assert ClusterConfig.from_json(other.to_json()) == other


def test_hosts_of_another_system_see_this_python_where_it_is_not_in_sight_anyway() -> None:
    paths = python_paths([])
    assert Path(sys.executable).resolve() in paths
    assert Path(os.__file__).resolve().parent in paths
    assert python_paths([Path("/")]) == []


def test_the_system_of_the_hosts_is_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_SERVE_CLUSTER_OS", "/srv/debian")
    assert ClusterConfig().os_root == Path("/srv/debian")
    monkeypatch.delenv("HPC_SERVE_CLUSTER_OS")
    assert ClusterConfig().os_root is None


@pytest.mark.parametrize("name", ["", "Upper", "../up", "a" * 16, "1st"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cluster name"):
        ClusterConfig(name=name)


def test_a_cluster_needs_a_node() -> None:
    with pytest.raises(ValueError, match="num_nodes is 0"):
        ClusterConfig(num_nodes=0)
