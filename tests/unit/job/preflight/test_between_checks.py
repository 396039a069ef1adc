"""The checks between nodes, and the judgement over all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.diagnose.causes import find_causes, note_lines
from hpc_serve.diagnose.evidence import LogEvidence
from hpc_serve.job.preflight.facts import NodeFacts, NodeReport
from hpc_serve.job.preflight.judge import judge, look
from hpc_serve.rendezvous.fields import from_json_text, to_json_text
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.preflight import PreflightReport, read_preflight
from hpc_serve.sizes import GIB
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
    report,
    with_cuda,
)

HEALTHY = (report("n1"), report("n2"), report("n3"))
A100 = replace(DEVICE, name="NVIDIA A100-SXM4-40GB", total_bytes=40 * GIB)


def seen_by(check, nodes, needs):
    """What a check finds on each node."""
    return next(seen for name, _, seen in look(nodes, needs) if name == check)


def software(**versions: str):
    return replace(SOFTWARE, versions={**VERSIONS, **versions})


def test_healthy_nodes_pass_every_check():
    verdicts = judge(HEALTHY, NEEDS)
    assert [(verdict.check, verdict.seen) for verdict in verdicts if verdict.level != "ok"] == []
    assert verdicts[0].nodes == ("n1", "n2", "n3")


def test_one_node_alone_has_nobody_to_reach():
    verdicts = judge([report("n1")], replace(NEEDS, num_nodes=1, world_size=8))
    unchecked = {verdict.check for verdict in verdicts if verdict.level != "ok"}
    assert unchecked == {"reach", "interfaces", "links", "clocks", "versions"}


@pytest.mark.parametrize(
    "chosen",
    [
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0,lo"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "ib,eth0:5000"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {},
    ],
)
def test_an_interface_that_is_there_may_be_chosen(chosen):
    nodes = [report("n1"), report("n2", network=replace(NETWORK, interfaces=("lo", "eth0"), chosen=chosen))]
    assert seen_by("interfaces", nodes, NEEDS)["n2"].level == "ok"


def test_engines_without_gpus_need_no_interface_of_nccl():
    nodes = [
        report("n1"),
        report("n2", network=replace(NETWORK, interfaces=("lo",), chosen={"NCCL_SOCKET_IFNAME": "ib"})),
    ]
    assert seen_by("interfaces", nodes, replace(NEEDS, gpus=0))["n2"].level == "ok"


UNREACHED = replace(report("n2"), unreached={"n3": "timed out", "n1": "timed out"})


def case(check, level, words, *, second=None, needs=NEEDS, **changes):
    """One check of three nodes, the second with these changes, and what is expected of it."""
    return check, second or report("n2", **changes), needs, level, words


CASES = {
    "a node does not reach another": case("reach", "failed", "cannot connect to n3 from 10.0.0.2", second=UNREACHED),
    "the same with an interface of one's own": case(
        "reach", "warning", "1 others no better", second=UNREACHED, needs=replace(NEEDS, has_own_gloo_interface=True)
    ),
    "it was not tried": case("reach", "not checked", "not tried", second=replace(report("n2"), unreached=None)),
    "two nodes with one address": case(
        "addresses", "failed", "2 nodes say that their address is 10.0.0.1", address="10.0.0.1"
    ),
    "an interface for Gloo that is not there": case(
        "interfaces",
        "failed",
        "GLOO_SOCKET_IFNAME is ib9, and the node has lo, eth0",
        network=replace(NETWORK, interfaces=("lo", "eth0"), chosen={"GLOO_SOCKET_IFNAME": "ib9"}),
    ),
    "none for NCCL": case(
        "interfaces",
        "failed",
        "NCCL_SOCKET_IFNAME is ib,=eth",
        network=replace(NETWORK, interfaces=("lo", "eth0"), chosen={"NCCL_SOCKET_IFNAME": "ib,=eth"}),
    ),
    "a name that is the loopback's": case(
        "addresses",
        "warning",
        "resolves to 127.0.1.1, 10.0.0.2, which no other node reaches",
        network=replace(NETWORK, resolved=("127.0.1.1", "10.0.0.2")),
    ),
    "a name of another network": case(
        "addresses", "warning", "not to that first", network=replace(NETWORK, resolved=("192.168.0.2", "10.0.0.2"))
    ),
    "a name that nobody knows": case("addresses", "warning", "does not resolve", network=replace(NETWORK, resolved=())),
    "a slow resolver": case(
        "addresses",
        "warning",
        "took 5.0 s to resolve",
        network=replace(NETWORK, resolved=("10.0.0.2",), resolving_s=5.0),
    ),
    "another MTU": case("links", "warning", "MTU 1500", network=replace(NETWORK, mtu=1500)),
    "InfiniBand is down": case(
        "links",
        "warning",
        "0 InfiniBand ports are active, 4 on the others",
        network=replace(NETWORK, active_ib_ports=0),
    ),
    "a clock that is behind": case(
        "clocks", "warning", "100.0 s behind the head's", second=replace(report("n2"), clock_ahead_s=-100.0)
    ),
    "a clock days behind": case(
        "clocks", "failed", "certificates are not valid", second=replace(report("n2"), clock_ahead_s=-100000.0)
    ),
    "a clock days ahead": case(
        "clocks", "warning", "ahead of the head's", second=replace(report("n2"), clock_ahead_s=100000.0)
    ),
    "another kind of GPU": case(
        "gpus-alike",
        "warning",
        "NVIDIA A100-SXM4-40GB 40 GiB; most are NVIDIA H100 80GB HBM3 79 GiB",
        gpus=with_cuda(devices=(A100,) * 8).gpus,
    ),
    "another Ray": case("versions", "failed", "ray 2.59.0", software=software(ray="2.59.0")),
    "another Python": case("versions", "failed", "python 3.11.9 (head: 3.12.3)", software=software(python="3.11.9")),
    "another patch of Python": case("versions", "warning", "python 3.12.9", software=software(python="3.12.9")),
    "another Python without Ray": case(
        "versions", "warning", "python 3.11.9", needs=replace(NEEDS, backend="mp"), software=software(python="3.11.9")
    ),
    "another vLLM": case("versions", "warning", "vllm 0.31.0", software=software(vllm="0.31.0")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_node_that_does_not_fit_is_named(name):
    check, second, needs, level, words = CASES[name]
    seen = seen_by(check, [report("n1"), second, report("n3")], needs)
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
    shm = next(verdict for verdict in judge(nodes, NEEDS) if verdict.check == "shm")
    assert (shm.level, shm.nodes, shm.took_s) == ("failed", ("n2", "n3"), 0.4)
    assert shm.sentence.startswith(
        "preflight check shm: failed on n2, n3: /dev/shm is not there, or not writable. To do: "
    )


def test_of_many_nodes_some_are_named():
    nodes = [report(f"n{number}", weights=replace(WEIGHTS, error="gone")) for number in range(1, 21)]
    verdict = next(one for one in judge(nodes, replace(NEEDS, num_nodes=20)) if one.check == "weights")
    assert verdict.where == "n1, n2, n3, n4, n5, n6, n7, n8 and 12 more"


def test_a_node_that_says_nothing_fails_nothing():
    silent = NodeReport(name="n2", facts=None)
    verdicts = judge([report("n1"), silent], NEEDS)
    assert {verdict.level for verdict in verdicts} <= {"ok", "not checked"}


def test_no_facts_at_all_fail_nothing():
    verdicts = judge([NodeReport(name="n1", facts=None), NodeReport(name="n2", facts=None)], NEEDS)
    assert {verdict.level for verdict in verdicts} <= {"ok", "not checked"}


def test_a_group_that_did_not_come_says_why():
    nodes = [report("n1", weights=None, problems={"weights": "no answer within 20 s"})]
    verdict = next(one for one in judge(nodes, NEEDS) if one.check == "weights")
    assert (verdict.level, verdict.seen) == ("not checked", "no answer within 20 s")


def test_facts_and_reports_travel_as_json(tmp_path):
    assert from_json_text(NodeFacts, to_json_text(FACTS), source="facts") == FACTS
    made = PreflightReport(verdicts=judge(HEALTHY, NEEDS), num_nodes=3, took_s=0.5, began_at=1.0)
    write_json(tmp_path / "report", made)
    assert read_preflight(tmp_path / "report") == made
    assert made.summary == "preflight of 3 nodes in 0.5 s: 20 ok"


BROKEN = (
    report("n1", gpus=replace(GPUS, cuda=replace(with_cuda().gpus.cuda, devices=(DEVICE,) * 7))),
    report(
        "n2",
        weights=replace(WEIGHTS, missing="only 1 of its 2 files of weights (b missing)"),
        software=software(ray="1"),
    ),
)


def test_the_doctor_names_what_failed_first_with_its_cure():
    failed = [verdict for verdict in judge(BROKEN, NEEDS) if verdict.level == "failed"]
    assert [verdict.check for verdict in failed] == ["versions", "gpus", "weights"]
    for verdict in failed:
        found = cause_in(verdict.sentence)
        assert found is not None
        assert (found.name, found.cause) == ("preflight", f"on {verdict.where}: {verdict.seen}")
        assert found.cure == verdict.cure


def test_what_is_only_a_warning_is_no_cause_to_the_doctor():
    log = LogEvidence("n1-node0.log")
    for name in CASES:
        check, second, needs, level, _ = CASES[name]
        if level == "warning":
            seen = seen_by(check, [report("n1"), second, report("n3")], needs)["n2"]
            said = f"preflight check x: warning on n2: {seen.text}. To do: {seen.cure}"
            note_lines(log, [f"2026-11-22 13:58:02 n1 WARNING hpc-serve: {said}"])
    assert find_causes([log]) == ()
