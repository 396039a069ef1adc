from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start import cpu_of_nodes
from tests.cluster.cpu_shares import Controller, find_controller


def test_version_1_limits_in_one_tree_and_counts_in_another():
    mounts = """\
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /cg/cpu cgroup rw,relatime,cpu 0 0
cgroup /cg/cpuacct cgroup rw,relatime,cpuacct 0 0
cgroup /cg/systemd cgroup rw,relatime,name=systemd 0 0
"""
    found = find_controller(mounts)
    assert found == Controller(version=1, limits=Path("/cg/cpu"), counts=Path("/cg/cpuacct"))
    assert found.trees == (Path("/cg/cpu"), Path("/cg/cpuacct"))
    assert find_controller("cgroup /cg/both cgroup rw,cpu,cpuacct 0 0\n").trees == (Path("/cg/both"),)
    assert find_controller("tmpfs /tmp tmpfs rw 0 0\n") is None


@pytest.mark.parametrize(("controllers", "version"), [("cpuset cpu io", 2), ("hugetlb", None)])
def test_version_2_is_taken_where_it_has_the_controller(tmp_path: Path, controllers: str, version: int | None):
    (tmp_path / "cgroup.controllers").write_text(f"{controllers}\n")
    found = find_controller(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (found and found.version) == version


def test_a_share_is_a_quota_of_a_short_period():
    one = Controller(version=1, limits=Path("/cg"), counts=None)
    assert one.limit_lines(0.125)[1:] == [("cpu.cfs_period_us", "10000"), ("cpu.cfs_quota_us", "1250")]
    assert ("cpu.cfs_quota_us", "-1") in one.limit_lines(None)
    two = Controller(version=2, limits=Path("/cg"), counts=Path("/cg"))
    assert two.limit_lines(1.5) == [("cpu.max", "15000 10000")]
    assert two.limit_lines(None) == [("cpu.max", "max 10000")]
    assert two.limit_lines(0.05) == [("cpu.max", "1000 20000")]  # the kernel refuses a shorter quota


def test_cpu_is_told_of_the_first_node_and_of_the_others():
    assert cpu_of_nodes([5.0, 1.0, 3.0]) == {"CPU of the first node, s": 5.0, "CPU of each other node, s": 2.0}
    assert cpu_of_nodes([5.0]) == {"CPU of the first node, s": 5.0}
    assert cpu_of_nodes([]) == {}
