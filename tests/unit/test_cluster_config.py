"""The cluster of the tests: its accounts and settings. That it comes up is shown by the tests that use it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.config import ClusterConfig, accounts_text
from tests.cluster.hosts import python_paths

CONFIG = ClusterConfig(name="two", num_nodes=2, cpus_per_node=8, memory_per_node_mib=16000, root=Path("/srv/clusters"))


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
    for config in (CONFIG, replace(CONFIG, os_root=Path("/srv/debian"))):
        assert ClusterConfig.from_json(config.to_json()) == config


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


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        *(({"name": name}, "cluster name") for name in ("", "Upper", "../up", "a" * 16, "1st")),
        ({"num_nodes": 0}, "is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ClusterConfig(**setting)
