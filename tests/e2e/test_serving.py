"""The whole path with nothing stood in for but the weights: real Slurm, Ray and vLLM, over hosts of their own.

The engine runs on CPU and a scaled-down model of the same architecture takes the place of the weights
(HPC_SERVE_MODEL); everything else is what a user runs. Starts are shared: one of 16 ranks, and two of 4 at once.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import BUSY, CHECKOUT, User, layout_script, send, with_another_ray

pytestmark = [pytest.mark.slurm, pytest.mark.engine]

ASK = Path(__file__).with_name("ask.py")
STRANGER = Path(__file__).parents[1] / "security" / "stranger.py"
HF_TOKEN = "hf_a-token-of-the-hub-that-is-a-secret"
START_S = 900.0  # 16 ranks on two cores: 100 to 140 s measured


@pytest.fixture(scope="module")
def alice(cluster, alice_env, tiny_models):
    return User(cluster, {**alice_env, **BUSY, "HPC_SERVE_MODEL": str(tiny_models / "405b"), "HF_TOKEN": HF_TOKEN})


@pytest.fixture(scope="module")
def mallory(cluster, alice_env):
    return User(cluster, alice_env, name="mallory")


def ask_from_a_job(alice: User, service: str, node: str):
    """A second Slurm job runs a client; what it got."""
    done = alice.run(
        "srun", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--mem=1G", sys.executable, str(ASK), service
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="class")
def big(alice):
    """sbatch sbatch/405b.sh, the committed file: two nodes, 16 ranks. Its last test ends it by a raylet's death."""
    job_id = alice.sbatch(CHECKOUT / "sbatch" / "405b.sh")
    record = alice.wait_until_ready("405b", job_id, START_S)
    yield record
    alice.run("scancel", job_id)
    alice.wait_until_gone(job_id)


class TestSixteenRanks:
    def test_the_committed_script_serves_on_two_nodes_with_eight_ranks_each(self, alice, big):
        assert (big["tensor_parallel_size"], big["pipeline_parallel_size"], big["num_nodes"]) == (8, 2, 2)
        workers = [process for process in alice.processes() if process.argv[0].startswith("ray::RayWorkerProc")]
        hosts = [process.host for process in workers]
        assert sorted(hosts) == sorted([node["name"] for node in big["nodes"]] * 8)

    def test_rays_head_runs_neither_a_dashboard_nor_a_server_for_ray_client(self, alice, big):
        words = [word for process in alice.processes() for word in process.argv]
        assert any(word.endswith("gcs_server") for word in words)
        assert not [word for word in words if word.endswith(("ray.util.client.server", "/dashboard/dashboard.py"))]

    def test_another_job_on_a_third_node_gets_a_completion_and_a_stream(self, alice, big):
        third = next(node for node in alice.cluster.nodes if node not in {n["name"] for n in big["nodes"]})
        got = ask_from_a_job(alice, "405b", third)
        assert got["model"] == "meta-llama/Llama-3.1-405B-Instruct"
        assert {"405b", "meta-llama/Llama-3.1-405B-Instruct"} <= set(got["models"])
        assert 0 < got["tokens"] <= 8
        assert got["text"].strip()
        assert got["chunks"] >= 2

    def test_every_route_but_health_asks_for_the_key(self, alice, mallory, big):
        log = (Path(big["log_dir"]) / f"{big['job_id']}-node0.log").read_text()
        routes = re.findall(r"Route: (\S+), Methods: (.+)", log)
        assert len(routes) > 20, "vLLM's own list of routes was not found in its log"
        asked = {}
        for path, methods in routes:
            for method in methods.split(", "):
                url = f"https://{big['hosts'][0]}:{big['port']}{re.sub(r'{.*?}', 'x', path)}"
                asked[method, path] = url
        statuses = _statuses(mallory, "n3", asked)
        open_routes = {route for route, status in statuses.items() if status != 401}
        assert open_routes == {("GET", "/health")}, open_routes
        wrong = _statuses(mallory, "n3", asked, "Authorization: Bearer wrong-key-of-the-right-kind")
        assert {route for route, status in wrong.items() if status != 401} == {("GET", "/health")}

    def test_rays_control_store_refuses_who_has_no_certificate_or_no_token(self, alice, mallory, big):
        """Also in tests/security, with certificates of a stranger's own."""
        told = {
            mode: mallory.run(
                *(sys.executable, str(STRANGER), "call_ray", big["hosts"][0], _gcs_port(mallory), "120"),
                node="n3",
                env={"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64},
            )
            for mode in ("token", "disabled")
        }
        for done in told.values():
            assert done.returncode == 0, done.stderr
            assert set(json.loads(done.stdout).values()) == {"UNAVAILABLE"}
        head = big["nodes"][0]["name"]
        folder = alice.run("sh", "-c", "ls -d /tmp/hs-*/tls", node=head).stdout.split()[0]
        done = alice.run(
            *(sys.executable, str(STRANGER), "call_with_wrong_token", big["hosts"][0], _gcs_port(mallory), folder),
            node=head,
        )
        assert json.loads(done.stdout) == {"answer": "UNAUTHENTICATED"}, done.stderr

    def test_the_second_user_reads_nothing_and_connects_nowhere(self, alice, mallory, big):
        private = list((alice.home / ".hpc-serve").rglob("*"))
        assert any(path.name == "api_key" for path in private)
        listing = "\n".join(map(str, [alice.home / ".hpc-serve", *private]))
        code = (
            "import os, sys\nfor path in sys.stdin.read().splitlines():\n    if os.access(path, os.R_OK): print(path)"
        )
        for node in (None, *alice.cluster.nodes):
            assert mallory.run(sys.executable, "-c", code, node=node, input=listing).stdout == ""
        head = big["nodes"][0]["name"]
        on_node = [
            f"/tmp/{name}" for name in alice.run("ls", "/tmp", node=head).stdout.split() if name.startswith("hs-")
        ]
        assert on_node
        assert mallory.run(sys.executable, "-c", code, node=head, input="\n".join(on_node)).stdout == ""
        stolen = mallory.run(
            sys.executable, str(ASK), "405b", node="n3", env={"HPC_SERVE_HOME": str(alice.home / ".hpc-serve")}
        )
        assert stolen.returncode != 0
        assert "chunks" not in stolen.stdout

    def test_the_secrets_are_in_no_argv_script_log_or_job_name(self, alice, big):
        home = alice.home / ".hpc-serve"
        key = (home / "services" / "405b" / "api_key").read_text().strip()
        run_dir = next((home / "jobs").glob(f"{big['job_id']}-r0-*"))
        token = (run_dir / "ray_token").read_text().strip()
        pem_keys = [(home / "authority" / "authority.pem"), (run_dir / "endpoint.key")]
        assert all(path.read_text().startswith("-----BEGIN PRIVATE KEY-----") for path in pem_keys)
        private_keys = [path.read_text().splitlines()[1] for path in pem_keys]
        job = alice.run("scontrol", "show", "job", big["job_id"]).stdout
        script = alice.run("scontrol", "write", "batch_script", big["job_id"], "-").stdout
        argv = "\n".join(" ".join(process.argv) for process in alice.cluster.processes())
        logs = alice.log("405b", big["job_id"]) + "".join(path.read_text() for path in alice.home.glob("*.log"))
        everything = {"argv": argv, "script": script, "job": job, "logs": logs, "record": json.dumps(big)}
        for secret in (key, token, HF_TOKEN, *private_keys):
            assert len(secret) > 30
            assert [place for place, text in everything.items() if secret in text] == []

    def test_a_killed_raylet_ends_a_real_engine_within_seconds(self, alice, big):
        other = big["nodes"][1]["name"]
        raylets = [p.pid for p in alice.processes() if p.host == other and p.argv[0].endswith("raylet/raylet")]
        send(raylets, signal.SIGKILL)
        alice.wait_until_gone(big["job_id"])
        record = alice.record("405b", big["job_id"])
        assert (record["state"], record["failed_part"]) == ("failed", f"ray worker on {other}")


@pytest.fixture(scope="class")
def two(alice):
    """Two services on the same two nodes, TP=2 x PP=2 each: one over Ray, one by vLLM's own multi-node start."""
    layout = ("--nodes=2", "--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--nodelist=n1,n2")
    jobs = {}
    for service, backend in (("over-ray", "ray"), ("over-mp", "mp")):
        shared = ("--name", service, "--backend", backend, "--no-exclusive", "--mem", "8G")
        done = alice.hpc_serve("submit", "--model=405b", *layout, *shared, "--json")
        assert done.returncode == 0, done.stderr
        jobs[service] = json.loads(done.stdout)["job_id"]
    yield {service: alice.wait_until_ready(service, job_id, START_S) for service, job_id in jobs.items()}
    for job_id in jobs.values():
        alice.run("scancel", job_id)
    for job_id in jobs.values():
        alice.wait_until_gone(job_id)


class TestTwoServicesOnTheSameNodes:
    def test_both_answer(self, alice, two):
        assert {node["name"] for record in two.values() for node in record["nodes"]} == {"n1", "n2"}
        for service in two:
            assert ask_from_a_job(alice, service, "n3")["chunks"] >= 2

    def test_a_killed_engine_is_started_again_over_the_same_ray(self, alice, two):
        before = two["over-ray"]
        raylets = {p.pid for p in alice.processes() if p.argv[0].endswith("raylet/raylet")}
        server = next(p for p in alice.processes() if _is_vllm(p.argv) and "over-ray" in p.argv)
        os.kill(server.pid, signal.SIGKILL)
        again = alice.wait_for_record(
            "over-ray", before["job_id"], lambda record: record["engine_restarts"] == 1, timeout_s=180
        )
        assert again["reason"].startswith("engine exited with 137")  # its core may report an error of its own then
        after = alice.wait_for_record(
            "over-ray",
            before["job_id"],
            lambda record: record["state"] == "ready" and record["engine_restarts"] == 1,
            START_S,
        )
        assert after["port"] != before["port"]
        assert raylets == {p.pid for p in alice.processes() if p.argv[0].endswith("raylet/raylet")}
        assert ask_from_a_job(alice, "over-ray", "n3")["chunks"] >= 2
        assert alice.record("over-mp", two["over-mp"]["job_id"])["state"] == "ready"

    def test_stopping_one_leaves_the_other_alone(self, alice, two):
        alice.cancel(two["over-ray"]["job_id"])
        wait_for(lambda: not alice.is_queued(two["over-ray"]["job_id"]), 180, what="the end of one")
        assert ask_from_a_job(alice, "over-mp", "n3")["chunks"] >= 2
        wait_for(lambda: not [p for p in alice.processes() if "raylet" in p.argv[0]], 180, what="no Ray left")
        assert alice.record("over-mp", two["over-mp"]["job_id"])["state"] == "ready"


def test_vllm_that_was_imported_for_a_ray_that_never_forms_ends_with_the_run(alice):
    """The second node's `ray` hangs. Until the deadline vllm acts on no word of its command."""
    edit = with_another_ray(alice, "never-forms", 1, "exec sleep 600")
    script = edit(layout_script("never-forms", tensor_parallel_size=2, num_nodes=2, backend="ray"))
    job_id = alice.sbatch(alice.write("never-forms.sh", script), env={"HPC_SERVE_JOIN_S": "30"})
    seen: set[tuple[str, ...]] = set()

    def has_failed() -> bool:
        seen.update(process.argv[:3] for process in alice.processes() if _is_vllm(process.argv))
        record = alice.record("never-forms", job_id)
        return record is not None and record["state"] == "failed"

    wait_for(has_failed, 300, what="failed")
    alice.wait_until_gone(job_id)
    record = alice.record("never-forms", job_id)
    assert record["failed_part"] == "ray nodes"
    assert "has not joined within 30 s" in record["reason"]
    assert [words[1:] for words in seen] == [("-m", "hpc_serve.job.engine.engine_start")]
    assert "APIServer" not in alice.log("never-forms", job_id)


def _is_vllm(argv: Sequence[str]) -> bool:
    """Started as a command, or by `hpc_serve.job.engine.engine_start`."""
    return any(word.endswith("/vllm") and following == "serve" for word, following in itertools.pairwise(argv[:5]))


def _statuses(user: User, node: str, asked: dict[tuple[str, str], str], *headers: str) -> dict[tuple[str, str], int]:
    """The status of each request, all from one process on `node`."""
    code = (
        "import json, ssl, sys, urllib.request as r\n"
        "anybody = r.HTTPSHandler(context=ssl._create_unverified_context())\n"
        "opener = r.build_opener(r.ProxyHandler({}), anybody)\n"
        "headers = dict(h.split(': ', 1) for h in sys.argv[1:])\n"
        "for method, path, url in json.load(sys.stdin):\n"
        "    request = r.Request(url, method=method, data=b'{}' if method == 'POST' else None,\n"
        "                        headers={'Content-Type': 'application/json', **headers})\n"
        "    try: status = opener.open(request, timeout=60).status\n"
        "    except r.HTTPError as error: status = error.code\n"
        "    print(json.dumps([method, path, status]))\n"
    )
    listing = json.dumps([[method, path, url] for (method, path), url in asked.items()])
    done = user.run(sys.executable, "-c", code, *headers, node=node, input=listing)
    assert done.returncode == 0, done.stderr
    return {(method, path): status for method, path, status in map(json.loads, done.stdout.splitlines())}


def _gcs_port(user: User) -> str:
    """What anybody on the node can see in the process list, once the GCS listens."""
    argv = next(p.argv for p in user.cluster.processes() if p.argv[0].endswith("raylet/raylet"))
    return next(word.rpartition(":")[2] for word in argv if word.startswith("--gcs-address="))
