"""The preflight of two nodes over a real control connection: what they send, and what the head makes of it."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import pytest

from hpc_serve.job.links.control import WorkerLinks
from hpc_serve.job.preflight import node_side
from hpc_serve.job.preflight.head_side import HeadPreflight, write_report
from hpc_serve.job.preflight.node_side import Peer, PeerListener, find_unreached
from hpc_serve.job.run import parts as outcome_module
from hpc_serve.job.run.parts import Parts, RunEnd
from hpc_serve.job.worker import run_worker
from hpc_serve.rendezvous.fields import to_json_text
from hpc_serve.rendezvous.store import ServiceStore, read_preflight
from tests.support.nodes import ALLOCATION, listen_for_workers, make_node, write_program

HEAD, WORKER = "127.0.0.2", "127.0.0.1"  # Linux connects to the first from the second


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """Runs the preflight of a head and a worker; returns the report and how the worker's run ended."""
    monkeypatch.setattr(outcome_module, "_SETTLE_S", 0.01)
    for name in ("vllm", "ray"):
        write_program(tmp_path / name, "#!/bin/sh\nsleep 600\n")

    async def meet():
        environ = {
            **{"PATH": str(tmp_path), "HPC_SERVE_JOB_DIR": str(tmp_path), "HPC_SERVE_LOG_DIR": str(tmp_path)},
            "VLLM_RPC_BASE_PATH": "/tmp",  # pytest's own folders have long names
        }
        head = make_node(tmp_path, head=HEAD, run_mark=f"test-{os.getpid()}-preflight", environ=environ)
        worker = replace(head, allocation=replace(ALLOCATION, node_rank=1, node_name="n2"))
        run_end = RunEnd()
        parts = Parts(head.run_mark, run_end)
        joined = asyncio.Event()
        preflight = HeadPreflight(head)

        def on_join(link):
            preflight.ask(link)
            joined.set()

        workers = WorkerLinks(2, parts, on_join)
        ServiceStore(tmp_path / "home").ensure_service("8b")
        server = listen_for_workers(tmp_path, workers.add_worker)
        running = asyncio.create_task(run_worker(worker))
        try:
            await asyncio.wait_for(joined.wait(), 60)
            report = await asyncio.wait_for(preflight.report(), 120)
        finally:
            server.close()
            await parts.take_down()
        code = await asyncio.wait_for(running, 60)
        write_report(head, ServiceStore(tmp_path / "home"), report)
        return report, code

    return meet


def by_name(report):
    return {verdict.check: verdict for verdict in report.verdicts}


async def test_both_nodes_are_looked_at_and_reach_each_other(two_nodes, tmp_path):
    report, code = await two_nodes()
    verdicts = by_name(report)
    assert code == 0
    assert report.num_nodes == 2
    assert (verdicts["reach"].level, verdicts["reach"].nodes) == ("ok", ("n1", "n2"))
    assert verdicts["addresses"].level in ("ok", "warning"), verdicts["addresses"]  # the host's name is another's
    assert (verdicts["clocks"].level, verdicts["versions"].level) == ("ok", "ok")
    assert (verdicts["commands"].level, verdicts["commands"].nodes) == ("ok", ("n1", "n2"))
    assert (verdicts["paths"].level, verdicts["disk"].took_s > 0) == ("ok", True)
    written = tmp_path / "home" / "services" / "8b" / "1-r0-0.preflight"
    assert read_preflight(written) == report
    assert written.stat().st_mode & 0o777 == 0o600


async def test_a_command_that_a_node_lacks_fails_the_check(two_nodes, tmp_path):
    (tmp_path / "ray").unlink()
    report, _ = await two_nodes()
    commands = by_name(report)["commands"]
    assert (commands.level, commands.nodes) == ("failed", ("n1", "n2"))
    assert commands.seen == "no command ray in this environment"


@pytest.mark.parametrize("broken", ["n1", "n2"])
async def test_a_node_that_cannot_answer_fails_nothing(two_nodes, monkeypatch, broken):
    gather = node_side._gather_facts

    async def break_off(node):
        if node.allocation.node_name == broken:
            raise ValueError("no such thing")
        return await gather(node)

    monkeypatch.setattr(node_side, "_gather_facts", break_off)
    report, code = await two_nodes()
    assert code == 0
    paths = by_name(report)["paths"]
    assert (paths.level, paths.nodes, paths.seen) == ("not checked", (broken,), "the node sent no facts in time")


async def test_a_head_that_cannot_listen_at_its_address_is_looked_at_all_the_same(two_nodes, monkeypatch):
    def refuse_head(name, address, token):
        if name == "n1":
            raise OSError("Cannot assign requested address")
        return PeerListener(name, address, token)

    monkeypatch.setattr("hpc_serve.job.preflight.node_side.PeerListener", refuse_head)
    report, code = await two_nodes()
    assert (code, by_name(report)["paths"].level) == (0, "ok")
    assert by_name(report)["reach"].level == "not checked"


async def test_facts_that_cannot_be_read_count_as_not_sent(two_nodes, monkeypatch):
    facts_of = {"n2": '{"name": 3}'}
    written = "hpc_serve.job.preflight.node_side.to_json_text"
    monkeypatch.setattr(written, lambda facts: facts_of.get(facts.name) or to_json_text(facts))
    report, _ = await two_nodes()
    paths = by_name(report)["paths"]
    assert (paths.level, paths.nodes) == ("not checked", ("n2",))


async def test_a_node_that_does_not_listen_is_named():
    with socket.socket() as bound:
        bound.bind((WORKER, 0))
        peer = Peer(name="n2", address=WORKER, port=bound.getsockname()[1])
        assert list(await find_unreached([peer], "secret", within_s=0.1)) == ["n2"]


@pytest.mark.parametrize(("name", "token"), [("n3", "secret"), ("n2", "another")])
async def test_another_program_is_no_node(name, token):
    listener = PeerListener(name, WORKER, token)
    peer = replace(listener.peer, name="n2")
    try:
        assert list(await find_unreached([peer], "secret", within_s=0.1)) == ["n2"]
    finally:
        listener.close()
