"""The engine's command line: read from what a person may have edited, completed with what only the job knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.hub.local_weights import find_stand_in
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.vllm.command import (
    GATE,
    Device,
    check_layout,
    choose_backend,
    headless_argv,
    ray_data_parallel_environ,
    read_command,
    server_args,
    settings_text,
)
from tests.unit.vllm.conftest import of_node, read

FILES = ("/run/key", "/run/certificate")


def check(line: str, *, num_nodes: int, per_node: int, backend: str, device: Device = "GPU") -> None:
    check_layout(read(line), num_nodes=num_nodes, device=device, per_node=per_node, backend=backend)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("org/m", "model", "org/m"),
        ("m --served-model-name org/m m", "served_model_names", ("org/m", "m")),
        ("m -tp 8 --pipeline_parallel_size=2", "world_size", 16),
        ("m -tp 2 -dp 1", "world_size", 2),
        ("m -tp 2 --data-parallel-size=4", "world_size", 8),
        ("m --seed -1 --port 80", "port", 80),
        ("m --scheduling-policy priority", "scheduling_policy", "priority"),
        ("m", "scheduling_policy", None),
    ],
)
def test_what_a_command_says_is_read_as_vllm_reads_it(line, field, value):
    assert getattr(read(line), field) == value


@pytest.mark.parametrize("text", ["", "vllm", "vllm serve", "--port 1", "python app.py"])
def test_a_command_without_a_model_is_refused(text):
    with pytest.raises(InvalidRequestError, match=r"MODEL|no model"):
        read_command(text.split())


def test_a_layout_that_is_no_number_is_refused():
    with pytest.raises(InvalidRequestError, match="whole number"):
        read("m --tensor-parallel-size eight")


def test_a_stand_in_takes_the_place_of_the_weights_and_keeps_the_name(tmp_path: Path):
    (tmp_path / "hpc-serve-args.txt").write_text("# small\n--max-model-len 64\n--tensor-parallel-size 2\n")
    stand_in = find_stand_in({"HPC_SERVE_MODEL": str(tmp_path)})
    command = read("org/m --tensor-parallel-size 8", stand_in=stand_in)
    assert command.argv == (
        *("vllm", "serve", str(tmp_path), "--tensor-parallel-size", "8", "--served-model-name", "org/m"),
        *("--max-model-len", "64", "--tensor-parallel-size", "2"),
    )
    assert (command.model, command.served_model_names) == ("org/m", ("org/m",))
    assert command.tensor_parallel_size == 2


def test_a_script_s_options_of_another_version_are_passed_on_as_they_are():
    line = "m --new-option a b -tp 2 --kv-cache-dtype new --max-num-seq 4"
    command = read(line)
    assert list(command.argv) == ["vllm", "serve", *line.split()]
    assert command.tensor_parallel_size == 2


def test_middleware_of_the_owner_stays_and_the_gate_comes_last():
    command = read("m --middleware a.B")
    argv = [*command.argv, *server_args(command, tls_files=FILES)]
    assert [argv[place + 1] for place, word in enumerate(argv) if word == "--middleware"] == ["a.B", GATE]


def test_a_stand_in_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match="HPC_SERVE_MODEL="):
        find_stand_in({"HPC_SERVE_MODEL": str(tmp_path / "no")})


@pytest.mark.parametrize(
    ("backend", "line", "num_nodes", "chosen"),
    [
        ("auto", "m", 1, "mp"),
        ("auto", "m", 2, "ray"),
        ("mp", "m", 2, "mp"),
        ("ray", "m", 1, "ray"),
        ("auto", "m --distributed-executor-backend mp", 2, "mp"),
        ("auto", "m --data-parallel-size 2", 2, "mp"),
        ("ray", "m --data-parallel-size 2", 2, "ray"),
        ("auto", "m -dp 2 --distributed-executor-backend ray", 2, "ray"),
    ],
)
def test_several_nodes_use_ray_unless_told_otherwise(backend, line, num_nodes, chosen):
    assert choose_backend(backend, read(line), num_nodes) == chosen


@pytest.mark.parametrize("backend", ["mp", "ray"])
@pytest.mark.parametrize(
    ("layout", "num_nodes", "gpus"),
    [
        *[("-tp 8 -pp 2", 2, 8), ("-tp 8 -pp 2", 4, 4), ("-tp 2", 1, 0)],
        *[("-dp 2", 1, 2), ("-dp 2", 2, 1), ("-dp 8 -tp 2", 2, 8), ("-dp 2 -tp 8", 4, 4)],
    ],
)
def test_a_layout_that_fits_passes(layout, num_nodes, gpus, backend):
    check(f"m {layout}", num_nodes=num_nodes, per_node=gpus, backend=backend)


def test_tpus_and_servers_on_each_node_pass_with_their_backend():
    check("m -tp 16", num_nodes=4, per_node=4, device="TPU", backend="ray")
    check("m -dp 4 -tp 2 --data-parallel-hybrid-lb", num_nodes=2, per_node=4, backend="mp")
    with pytest.raises(DoesNotFitError, match="Ray alone"):
        check("m -tp 16", num_nodes=4, per_node=4, device="TPU", backend="mp")


@pytest.mark.parametrize(
    ("layout", "num_nodes", "gpus", "backend", "why"),
    [
        ("-tp 8 -pp 2", 1, 8, "ray", "ask for more nodes"),
        ("-tp 8", 2, 8, "ray", "a whole node would stay idle"),
        ("-tp 3", 2, 2, "ray", "cannot share evenly"),
        ("-tp 16", 2, 0, "ray", "within one node"),
        ("-dp 2 -tp 12", 3, 8, "mp", "3 nodes x 8 of 8 GPUs cut a data-parallel rank of 12"),
        ("-dp 2 -tp 14", 4, 8, "ray", "4 nodes x 7 of 8 GPUs cut a data-parallel rank of 14"),
        ("-dp 4 --data-parallel-hybrid-lb", 2, 2, "ray", "a server on each node.* and uses ray"),
        ("-dp 4 --data-parallel-hybrid-lb", 1, 4, "mp", "a server on each node.* has 1 node x 4 GPUs"),
        ("-dp 2 -tp 8 --data-parallel-hybrid-lb", 4, 4, "mp", "a server on each node"),
        ("-dp 8 -tp 4", 2, 8, "mp", "DP=8 x TP=4 x PP=1 = 32 GPUs, the job has 2 nodes x 8 GPUs"),
    ],
)
def test_a_layout_that_cannot_use_the_allocation_is_refused(layout, num_nodes, gpus, backend, why):
    with pytest.raises(DoesNotFitError, match=why):
        check(f"m {layout}", num_nodes=num_nodes, per_node=gpus, backend=backend)


@pytest.mark.parametrize(
    ("layout", "told"),
    [("-tp 4", "master-port: 20001\n"), ("-dp 4", "master-port: 20001\ndata-parallel-rpc-port: 20002\n")],
)
def test_processes_of_several_nodes_meet_at_ports_of_a_file(layout, told):
    ports = iter((20_001, 20_002))
    assert settings_text(read(f"m {layout}"), lambda: next(ports)) == told


def test_a_node_without_a_server_is_told_no_number_of_servers():
    command = read("m -dp 4 --api-server-count 2 --max-num-seqs 8")
    assert (command.api_servers, headless_argv(command)) == (
        2,
        ["vllm", "serve", "m", "-dp", "4", "--max-num-seqs", "8"],
    )


@pytest.mark.parametrize(
    ("layout", "is_told"), [("-dp 4", True), ("-dp 4 --api-server-count 2", False), ("-tp 4", False)]
)
def test_an_engine_with_data_parallel_ranks_has_one_server_unless_the_line_says_otherwise(layout, is_told):
    args = server_args(read(f"m {layout}"), tls_files=FILES)
    assert ("--api-server-count" in args) == is_told


def test_the_head_is_told_only_what_the_line_leaves_open():
    line = "m -tp 2 --port 9000 --distributed-executor-backend ray"
    told = "--host 127.0.0.1 --port 0 --middleware hpc_serve.gate.engine_gate.Gate"
    told += " --ssl-keyfile /run/key --ssl-certfile /run/certificate"
    assert server_args(read(line), tls_files=FILES) == told.split()
    assert of_node(line, backend="ray") == []
    assert of_node("m", backend="mp") == []
    assert of_node("m -tp 2", backend="mp") == ["--distributed-executor-backend", "mp"]


@pytest.mark.parametrize(("device", "is_told"), [("GPU", True), ("TPU", False)])
def test_vllm_chooses_its_executor_on_tpus_by_itself(device, is_told):
    args = of_node("m -tp 8", backend="ray", device=device)
    assert ("--distributed-executor-backend" in args) == is_told


@pytest.mark.parametrize(("further", "last"), [("", ["--headless"]), (" --data-parallel-hybrid-lb", [])])
def test_of_several_nodes_the_first_has_a_server_or_each(further, last):
    first, second = (of_node(f"m -dp 4{further}", num_nodes=2, rank=rank, backend="mp") for rank in (0, 1))
    told = "--distributed-executor-backend mp --nnodes 2 --node-rank {} --master-addr 10.0.0.1 --config /engine.yaml"
    assert first == told.format(0).split()
    assert second == [*told.format(1).split(), *last]


def test_over_ray_one_command_places_whole_ranks_on_nodes_or_spans_nodes_with_each():
    told = "--distributed-executor-backend ray --data-parallel-backend ray"
    assert of_node("m -dp 4", num_nodes=2, backend="ray") == f"{told} --data-parallel-size-local 2".split()
    assert of_node("m -dp 4", num_nodes=1, backend="ray") == told.split()
    assert of_node("m -dp 2 -tp 8", num_nodes=4, backend="ray") == told.split()
    assert ray_data_parallel_environ(read("m -dp 2"), 4)
    assert not ray_data_parallel_environ(read("m -dp 4"), 4)
    assert not ray_data_parallel_environ(read("m -tp 8"), 4)


@pytest.mark.parametrize("text", ["--api-key s3cret", "--api_key=s3cret", "--uds /x", "--headless", "-pcp 2", "-dpl 1"])
def test_what_would_leak_or_hide_the_engine_is_refused_without_repeating_it(text):
    with pytest.raises(InvalidRequestError, match="cannot be given to the engine") as refused:
        read(f"m {text}")
    assert "s3cret" not in str(refused.value)
    with pytest.raises(InvalidRequestError, match="cannot be given to the engine"):
        ServeRequest(model="8b", service="8b", engine_args=tuple(text.split()))
