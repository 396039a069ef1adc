"""The checks between nodes, and the judgement over all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.diagnose.causes import find_causes, note_lines
from hpc_serve.diagnose.evidence import LogEvidence
from hpc_serve.job.preflight.facts import NodeFacts
from hpc_serve.job.preflight.judge import judge, run_checks
from hpc_serve.rendezvous.fields import from_json_text, to_json_text
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.store import PreflightReport, read_preflight
from hpc_serve.units import GIB
from tests.unit.diagnose.cases_of_logs import cause_in
from tests.unit.job.preflight.nodes import (
    DEVICE,
    FACTS,
    GPUS,
    MEMORY,
    NEEDS,
    NETWORK,
    SOFTWARE,
    VERSIONS,
    WEIGHTS,
    changed,
    changed_run,
    report,
)

HEALTHY = (report("n1"), report("n2"), report("n3"))
A100 = replace(DEVICE, name="NVIDIA A100-SXM4-40GB", total_bytes=40 * GIB)


def by_name(nodes):
    return {facts.name: facts for facts in nodes}


def seen_by(check, nodes, needs):
    """What a check finds on each node."""
    return next(seen for name, _, seen in run_checks(by_name(nodes), needs) if name == check)


def test_healthy_nodes_pass_every_check():
    verdicts = judge(by_name(HEALTHY), NEEDS)
    assert [(verdict.check, verdict.seen) for verdict in verdicts if verdict.level != "ok"] == []
    assert verdicts[0].nodes == ("n1", "n2", "n3")


def test_one_node_alone_has_nobody_to_reach():
    verdicts = judge({"n1": report()}, replace(NEEDS, num_nodes=1, world_size=8))
    unchecked = {verdict.check for verdict in verdicts if verdict.level != "ok"}
    assert unchecked == {"reach", "interfaces", "links", "clocks", "versions"}


@pytest.mark.parametrize(
    ("gpus", "variable", "words"),
    [
        (8, "GLOO_SOCKET_IFNAME", "eth0"),
        (8, "GLOO_SOCKET_IFNAME", "eth0,lo"),
        (8, "NCCL_SOCKET_IFNAME", "eth"),
        (8, "NCCL_SOCKET_IFNAME", "=eth0"),
        (8, "NCCL_SOCKET_IFNAME", "ib,eth0:5000"),
        (8, "NCCL_SOCKET_IFNAME", "^docker,lo"),
        (0, "NCCL_SOCKET_IFNAME", "ib"),  # of an engine without GPUs, which does not use it
    ],
)
def test_an_interface_that_is_there_may_be_chosen(gpus, variable, words):
    network = replace(NETWORK, interfaces=("lo", "eth0"), chosen={variable: words})
    nodes = [report("n1"), report("n2", network=network)]
    assert seen_by("interfaces", nodes, replace(NEEDS, gpus=gpus))["n2"].level == "ok"


def chosen(**words: str) -> dict[str, object]:
    return {"network.interfaces": ("lo", "eth0"), "network.chosen": words}


UNREACHED = {"unreached": {"n3": "timed out", "n1": "timed out"}}
LOOPBACK_FIRST = {"network.resolved": ("127.0.1.1", "10.0.0.2")}
OTHER_PYTHON = {"software.versions": {**VERSIONS, "python": "3.11.9"}}
# A check of three nodes, the result on the second, and what is different there.
CASES = [
    ("reach", "failed", "cannot connect to n3 from 10.0.0.2", UNREACHED),
    ("reach", "warning", "1 others no better", {**UNREACHED, "needs.has_own_gloo_interface": True}),
    ("reach", "not checked", "not tried", {"unreached": None}),
    ("addresses", "failed", "2 nodes say that their address is 10.0.0.1", {"address": "10.0.0.1"}),
    ("interfaces", "failed", "GLOO_SOCKET_IFNAME is ib9, and the node has lo, eth0", chosen(GLOO_SOCKET_IFNAME="ib9")),
    ("interfaces", "failed", "NCCL_SOCKET_IFNAME is ib,=eth", chosen(NCCL_SOCKET_IFNAME="ib,=eth")),
    ("addresses", "warning", "resolves to 127.0.1.1, 10.0.0.2, which no other node reaches", LOOPBACK_FIRST),
    ("addresses", "warning", "not to that first", {"network.resolved": ("10.9.0.2", "10.0.0.2")}),
    ("addresses", "warning", "does not resolve", {"network.resolved": ()}),
    ("addresses", "warning", "took 5.0 s to resolve", {"network.resolving_s": 5.0}),
    ("links", "warning", "MTU 1500", {"network.mtu": 1500}),
    ("links", "warning", "0 InfiniBand ports are active, 4 on the others", {"network.active_ib_ports": 0}),
    ("clocks", "warning", "100.0 s behind the head's", {"clock_ahead_s": -100.0}),
    ("clocks", "failed", "certificates are not valid", {"clock_ahead_s": -100000.0}),
    ("clocks", "warning", "ahead of the head's", {"clock_ahead_s": 100000.0}),
    ("gpus-alike", "warning", "A100-SXM4-40GB 40 GiB; most are", {"gpus.cuda.devices": (A100,) * 8}),
    ("versions", "failed", "ray 2.59.0", {"software.versions": {**VERSIONS, "ray": "2.59.0"}}),
    ("versions", "failed", "python 3.11.9 (head: 3.12.3)", OTHER_PYTHON),
    ("versions", "warning", "python 3.12.9", {"software.versions": {**VERSIONS, "python": "3.12.9"}}),
    ("versions", "warning", "python 3.11.9", {**OTHER_PYTHON, "needs.backend": "mp"}),
    ("versions", "warning", "vllm 0.31.0", {"software.versions": {**VERSIONS, "vllm": "0.31.0"}}),
]


def on_the_second(check, changes):
    facts, needs = changed_run(report("n2"), changes)
    return seen_by(check, [report("n1"), facts, report("n3")], needs)


@pytest.mark.parametrize(("check", "level", "words", "changes"), CASES)
def test_a_node_that_does_not_fit_is_named(check, level, words, changes):
    seen = on_the_second(check, changes)
    assert seen["n2"].level == level, seen["n2"]
    assert words in seen["n2"].text
    assert bool(seen["n2"].cure) == (level in ("warning", "failed"))
    if level != "failed" or check != "addresses":
        assert seen["n3"].level == "ok"


def test_slow_links_without_infiniband_are_said():
    slow = replace(NETWORK, interface="eth0", speed_mbits=1000, active_ib_ports=0)
    seen = seen_by("links", [report("n1", network=slow), report("n2", network=slow)], NEEDS)
    assert (seen["n1"].level, seen["n2"].level) == ("warning", "warning")
    assert "eth0 has 1 Gbit/s" in seen["n1"].text


def test_a_verdict_names_the_nodes_that_it_is_about_and_the_slowest_time():
    bad = replace(MEMORY, shm_is_writable=False)
    nodes = [report("n1"), report("n2", memory=bad, took_s={"memory": 0.4}), report("n3", memory=bad)]
    shm = next(verdict for verdict in judge(by_name(nodes), NEEDS) if verdict.check == "shm")
    assert (shm.level, shm.nodes, shm.took_s) == ("failed", ("n2", "n3"), 0.4)
    assert shm.sentence.startswith(
        "preflight check shm: failed on n2, n3: /dev/shm is not there, or not writable. To do: "
    )


def test_of_many_nodes_some_are_named():
    nodes = [report(f"n{number}", weights=replace(WEIGHTS, error="gone")) for number in range(1, 21)]
    verdict = next(one for one in judge(by_name(nodes), replace(NEEDS, num_nodes=20)) if one.check == "weights")
    assert verdict.where == "n1, n2, n3, n4, n5, n6, n7, n8 and 12 more"


@pytest.mark.parametrize("first", [report("n1"), None])
def test_a_node_that_says_nothing_fails_nothing(first):
    verdicts = judge({"n1": first, "n2": None}, NEEDS)
    assert {verdict.level for verdict in verdicts} <= {"ok", "not checked"}


def test_facts_and_reports_travel_as_json(tmp_path):
    assert from_json_text(NodeFacts, to_json_text(FACTS), source="facts") == FACTS
    made = PreflightReport(verdicts=judge(by_name(HEALTHY), NEEDS), num_nodes=3, took_s=0.5, began_at=1.0)
    write_json(tmp_path / "report", made)
    assert read_preflight(tmp_path / "report") == made
    assert made.summary == "preflight of 3 nodes in 0.5 s: 20 ok"


BROKEN = (
    report("n1", gpus=changed(GPUS, {"cuda.devices": (DEVICE,) * 7})),
    report(
        "n2",
        weights=replace(WEIGHTS, missing="only 1 of its 2 files of weights (b missing)"),
        software=replace(SOFTWARE, versions={**VERSIONS, "ray": "1"}),
    ),
)


def test_the_doctor_names_what_failed_first_with_its_cure():
    failed = [verdict for verdict in judge(by_name(BROKEN), NEEDS) if verdict.level == "failed"]
    assert [verdict.check for verdict in failed] == ["versions", "gpus", "weights"]
    for verdict in failed:
        found = cause_in(verdict.sentence)
        assert (found.name, found.cause) == ("preflight", f"on {verdict.where}: {verdict.seen}")
        assert found.cure == verdict.cure


def test_what_is_only_a_warning_is_no_cause_to_the_doctor():
    log = LogEvidence("n1-node0.log")
    for check, level, _, changes in CASES:
        if level == "warning":
            seen = on_the_second(check, changes)["n2"]
            said = f"preflight check x: warning on n2: {seen.text}. To do: {seen.cure}"
            note_lines(log, [f"2026-11-22 13:58:02 n1 WARNING hpc-serve: {said}"])
    assert find_causes([log]) == ()
