"""The cluster's second user against real Slurm, Ray and vLLM: he gets nothing, ends nothing, and stops no start.

One engine over two hosts by Ray (TP=2 x PP=2) is shared by all tests; `test_one_host.py` has one on a single host. What
needs no engine is tried in the unit tests; `stranger.py` has what he does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import Record, User, stub_script
from tests.security.attacks import START_S, STRANGER, answers, listening, tries
from tests.security.test_ports import at_work

pytestmark = [pytest.mark.slurm, pytest.mark.engine]

TEN_STARTS = "HPC_SERVE_TEN_STARTS"


@pytest.fixture(scope="module")
def over_ray(alice, mallory):
    """Two hosts, Ray between them. On the head's a stranger listens on what is bound and silent until it is ready."""
    layout = ("--nodes=2", "--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--nodelist=n1,n2")
    shared = ("--name", "over-ray", "--backend", "ray", "--no-exclusive", "--mem", "8G")
    with at_work(mallory, "listen_beside_silent_ports", node="n1") as told:
        done = alice.hpc_serve("submit", "--model=405b", *layout, *shared, "--json")
        assert done.returncode == 0, done.stderr
        job_id = json.loads(done.stdout)["job_id"]
        record = alice.wait_until_ready("over-ray", job_id, START_S)
    yield {**record, **told}
    alice.run("scancel", job_id)
    alice.wait_until_gone(job_id)


def ray_processes(alice: User) -> set[int]:
    return {process.pid for process in alice.processes() if process.argv[0].endswith(("gcs_server", "raylet/raylet"))}


def control_ports(alice: User, record: Record) -> list[int]:
    """The ports of the head's launcher, but for the engine's, which it holds until the engine serves there."""
    head = record["nodes"][0]["name"]
    return [port for _, port, name in listening(alice, head) if name == "python" and port != record["port"]]


class TestRay:
    def test_a_stranger_who_listens_beside_silent_ports_has_not_the_engines(self, alice, over_ray):
        """vLLM binds one itself long before it would listen: he has that, and nobody is told of it."""
        assert over_ray["taken"]
        assert over_ray["port"] not in over_ray["taken"]
        assert answers(alice, "over-ray")

    def test_a_strangers_calls_are_refused_on_every_port_and_end_nothing(
        self, alice, mallory, over_ray, own_certificate
    ):
        before = ray_processes(alice)
        assert len(before) == 3
        for node, host in (("n1", over_ray["nodes"][0]["address"]), ("n2", over_ray["nodes"][1]["address"])):
            # Ray's processes listen on all addresses; torch's store does too, and speaks another language than gRPC.
            seen = listening(alice, node)
            rays = [port for _, port, name in seen if name in ("gcs_server", "raylet")]
            others = [port for address, port, _ in seen if address == "*" and port not in rays]
            assert len(rays) >= 2, seen
            assert others
            for shown in ((), (own_certificate,)):
                told = tries(mallory, "call_ray", host, ",".join(map(str, rays)), 120, *shown)
                assert set(told.values()) == {"UNAVAILABLE"}, (shown, told)
                told = tries(mallory, "call_ray", host, ",".join(map(str, others)), 10, *shown)
                assert set(told.values()) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, (shown, told)
        assert ray_processes(alice) == before
        assert answers(alice, "over-ray")

    def test_the_token_counts_beside_the_certificate(self, alice, over_ray):
        folder = alice.run("sh", "-c", "ls -d /tmp/hs-*/tls", node="n1").stdout.split()[0]
        gcs = next(port for _, port, name in listening(alice, "n1") if name == "gcs_server")
        host = over_ray["nodes"][0]["address"]
        assert tries(alice, "call_with_wrong_token", host, gcs, folder, node="n1") == {"answer": "UNAUTHENTICATED"}

    def test_the_strangers_see_no_certificate(self, alice, mallory, over_ray):
        files = alice.run("sh", "-c", "ls /tmp/hs-*/tls/*; ls ~/.hpc-serve/jobs/*/*", node="n1").stdout.split()
        assert any(name.endswith("node.key") for name in files)
        assert any(name.endswith("ray_authority.pem") for name in files)
        assert mallory.run("cat", *files, node="n1").stdout == ""

    def test_no_metrics_answer(self, alice, mallory, over_ray):
        # Those that Ray has for it, which any other program may have been given by chance, and whatever is open.
        ports = {44217, 44227, 8080, *(port for _, port, _ in listening(alice, "n1"))}
        assert len(ports) > 6
        told = tries(mallory, "ask_for_metrics", over_ray["nodes"][0]["address"], ",".join(map(str, sorted(ports))))
        assert told == {"answer": []}

    def test_the_launchers_listen_no_more_once_all_are_in(self, alice, over_ray):
        """The control port was the head's."""
        for node in ("n1", "n2"):
            pids = alice.run("pgrep", "-f", "^[^ ]*python[0-9.]* -m hpc_serve.job ", node=node).stdout.split()
            assert pids
            seen = alice.cluster.run(["ss", "-ltnpH"], user="root", node=node).stdout
            assert not [line for line in seen.splitlines() if any(f"pid={pid}," in line for pid in pids)]


def test_a_flooded_control_port_neither_stops_the_record_nor_fills_the_log(alice, mallory):
    text = stub_script("flooded", num_nodes=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    edited = text.replace('--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"', "--nodes=1 --ntasks=1")
    assert edited != text
    job_id = alice.sbatch(alice.write("flooded.sh", edited), env={"HPC_SERVE_JOIN_S": "600"})
    record = alice.wait_for_record(
        "flooded", job_id, lambda found: found["stage"] == "waiting for the nodes' launchers", 300
    )
    head = record["nodes"][0]
    ports = control_ports(alice, record)
    flood = mallory.cluster.popen(
        [sys.executable, STRANGER, "flood_control", head["address"], str(ports[0]), "1500"],
        user="mallory",
        node="n3",
        env=mallory.environ,
    )
    assert flood.stdout is not None
    told = json.loads(flood.stdout.readline())
    assert told["opened"] > 500, told
    counter = alice.record("flooded", job_id)["counter"]
    wait_for(lambda: alice.record("flooded", job_id)["counter"] > counter + 1, 180, what="renewals under the flood")
    pid = alice.run("pgrep", "-o", "-f", "^[^ ]*python[0-9.]* -m hpc_serve.job ", node=head["name"]).stdout.split()[0]
    held = alice.run("ls", f"/proc/{pid}/fd", node=head["name"]).stdout.split()
    assert len(held) < 150
    log = Path(record["log_dir"]) / f"{job_id}-node0.log"
    assert log.stat().st_size < 100_000
    flood.kill()
    flood.wait()
    alice.cancel(job_id)
    wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")


def test_a_stranger_who_takes_the_ports_that_command_lines_name_stops_no_start_of_ray(alice, mallory):
    """He watches on both nodes from before the start. Ray is real, the engine a stub.

    `ray` is a script of a site's own: then Ray's head has a server for Ray Client, on a port that its words name.
    """
    wrapped = alice.write("wrapped/ray", f'#!/bin/bash\nexec {sys.prefix}/bin/ray "$@"\n')
    wrapped.chmod(0o755)
    text = stub_script("watched", num_nodes=2, tensor_parallel_size=2, pipeline_parallel_size=2, backend="ray")
    activate = 'source "$environment/bin/activate"\n'
    assert activate in text
    text = text.replace(activate, f"{activate}export PATH={wrapped.parent}:$PATH\n")
    enough = mallory.home / "enough"
    watchers = [
        mallory.cluster.popen(
            [sys.executable, STRANGER, "take_ports_seen_in_command_lines", str(enough)],
            user="mallory",
            node=node,
            env=mallory.environ,
        )
        for node in ("n1", "n2")
    ]
    try:
        for watcher in watchers:
            assert watcher.stdout is not None
            assert json.loads(watcher.stdout.readline())["began"]
        job_id = alice.sbatch(alice.write("watched.sh", text), "--nodelist=n1,n2")
        alice.wait_until_ready("watched", job_id, 400)
        enough.touch()
        seen = [json.loads(watcher.communicate(timeout=300)[0]) for watcher in watchers]
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()
    argvs = [process.argv for process in alice.processes() if "ray.util.client.server" in process.argv]
    named = [word.partition("=")[2] for argv in argvs for word in argv if word.startswith("--port=")]
    log = (alice.home / f"hpc-serve-watched-{job_id}.log").read_text()
    alice.cancel(job_id)
    wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")
    assert named
    assert seen[0][named[0]] is False, "he saw the port, and could not take it"
    assert "attempt" not in log, log


def test_a_flood_without_end_from_the_nodes_of_a_job_keeps_no_node_out(alice, mallory):
    """The second node's launcher begins when the stranger is at it on both nodes."""
    text = stub_script("besieged", num_nodes=2, tensor_parallel_size=2, pipeline_parallel_size=2, backend="mp")
    waits = "bash -c 'until [[ $SLURM_NODEID -eq 0 || -e ~/begin ]]; do sleep 0.2; done; exec \"$@\"' --"
    edited = text.replace(" python -m hpc_serve.job --service", f" {waits} python -m hpc_serve.job --service")
    assert edited != text
    job_id = alice.sbatch(alice.write("besieged.sh", edited), "--nodelist=n1,n2")
    record = alice.wait_for_record(
        "besieged", job_id, lambda found: found["stage"] == "waiting for the nodes' launchers", 300
    )
    head = record["nodes"][0]
    ports = control_ports(alice, record)
    floods = [
        mallory.cluster.popen(
            [sys.executable, STRANGER, "flood_without_end", head["address"], str(ports[0]), said, "3000"],
            user="mallory",
            node=node,
            env=mallory.environ,
        )
        for node, said in (("n1", ""), ("n1", "{"), ("n2", ""), ("n2", "{"))
    ]
    try:
        for flood in floods:
            assert flood.stdout is not None
            assert json.loads(flood.stdout.readline())["opened"] == 1_000
        alice.write("begin", "")
        assert len(alice.wait_until_ready("besieged", job_id, 300)["nodes"]) == 2
        assert [flood.poll() for flood in floods] == [None] * 4
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
        alice.cancel(job_id)
    wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")


@pytest.mark.skipif(not os.environ.get(TEN_STARTS), reason=f"takes a quarter of an hour: {TEN_STARTS}=1 runs it")
def test_ten_real_starts_of_ten_have_their_own_port_beside_the_stranger(alice, mallory, tiny_models):
    """Each is ready at its first attempt, and answers at its own port."""
    layout = ("--nodes=1", "--tensor-parallel-size=1", "--pipeline-parallel-size=1", "--nodelist=n1")
    environ = {"HPC_SERVE_MODEL": str(tiny_models / "8b")}
    ports = []
    with at_work(mallory, "listen_beside_silent_ports", node="n1") as told:
        for number in range(10):
            service = f"beside-{number}"
            words = ("submit", "--model=8b", *layout, "--name", service, "--no-exclusive", "--mem=8G", "--json")
            done = alice.hpc_serve(*words, env=environ)
            assert done.returncode == 0, done.stderr
            job_id = json.loads(done.stdout)["job_id"]
            ports.append(alice.wait_until_ready(service, job_id, START_S)["port"])
            assert answers(alice, service)
            assert "met a port" not in alice.log(service, job_id)
            alice.run("scancel", job_id)
            alice.wait_until_gone(job_id)
    assert told["taken"]
    assert not set(ports) & set(told["taken"])
