"""The file that tells an engine its ports: what is in it, and that no command line has them."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_serve.job.network import HeadPorts
from hpc_serve.job.node import LaunchOptions
from hpc_serve.vllm.command import read_command
from tests.support.nodes import ALLOCATION, make_node

PORTS = HeadPorts(control=20_001, torch_master=20_002)


@pytest.mark.parametrize(
    ("backend", "num_nodes", "rank", "port", "text"),
    [
        ("ray", 2, 0, 9000, "port: 9000\n"),
        ("mp", 1, 0, 9000, "port: 9000\n"),
        ("mp", 2, 0, 9000, "port: 9000\nmaster-port: 20002\n"),
        ("mp", 2, 1, None, "master-port: 20002\n"),
    ],
)
def test_an_engine_reads_its_ports_from_a_private_file(tmp_path, backend, num_nodes, rank, port, text):
    allocation = dataclasses.replace(ALLOCATION, num_nodes=num_nodes, node_rank=rank)
    node = make_node(tmp_path, backend=backend, allocation=allocation, head_ports=PORTS)
    node.write_settings(port=port)
    assert node.settings_file.read_text() == text
    assert node.settings_file.stat().st_mode & 0o777 == 0o600
    assert "20002" not in " ".join(node.multi_node_args())


@pytest.mark.parametrize(
    ("words", "rank", "is_named"),
    [("vllm serve m", 0, False), ("vllm serve m --port 9000", 0, True), ("vllm serve m", 1, True)],
)
def test_each_node_of_several_without_ray_is_told_of_the_file_once(tmp_path, words, rank, is_named):
    """The head's engine is told of it by what it is told of its own port, unless a person has given that."""
    allocation = dataclasses.replace(ALLOCATION, node_rank=rank)
    node = make_node(tmp_path, backend="mp", allocation=allocation, command=read_command(words.split()))
    assert (str(node.settings_file) in node.multi_node_args()) == is_named


@pytest.mark.parametrize(("gpus", "told"), [(0, "0"), (8, None)])
def test_code_for_cpus_is_kept_in_the_only_form_that_can_be_read(tmp_path, gpus, told):
    options = LaunchOptions(service="8b", backend="mp", gpus_per_node=gpus)
    node = make_node(tmp_path, options=options)
    assert node.child_environ(address="127.0.0.1").get("VLLM_USE_AOT_COMPILE") == told
    by_hand = dataclasses.replace(node, environ={"VLLM_USE_AOT_COMPILE": "1"})
    assert by_hand.child_environ(address="127.0.0.1")["VLLM_USE_AOT_COMPILE"] == "1"
