"""The cluster's second user against one real vLLM engine on one host: its port, its records, and every way in.

All tests share the engine; the last class takes it away. `stranger.py` has what the second user runs, and
`ask_every_way.py` has the owner's clients.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User, layout_script, stub_script
from tests.security.attacks import START_S, STRANGER, answers, endpoint, listening, tries

pytestmark = [pytest.mark.slurm, pytest.mark.engine]

ASK_EVERY_WAY = Path(__file__).with_name("ask_every_way.py")
PROMPT = "the-secret-prompt"
WRONG_KEY = "a-wrong-key-of-the-right-kind-0123456789"
CURL = (
    'curl --silent --show-error --max-time 100 --output /dev/null --write-out "%{http_code}" '
    '${OPENAI_API_KEY:+-H "Authorization: Bearer $OPENAI_API_KEY"} -H "Content-Type: application/json" '
    '"$OPENAI_BASE_URL/chat/completions" --data "$BODY"'
)
BODY = json.dumps({"model": "8b", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4})


@pytest.fixture(scope="module")
def on_one_host(alice, mallory, tiny_models):
    """One host, where the stranger holds a port in every 256, and has made the folder of caches, before the start."""
    folder = f"/tmp/hpc-serve-cache-{owner_ids(alice)[0]}"
    assert mallory.run("mkdir", "-m", "777", folder, node="n3").returncode == 0
    thief = mallory.cluster.popen(
        [sys.executable, STRANGER, "take_a_port_in_every_block"], user="mallory", node="n3", env=mallory.environ
    )
    assert thief.stdout is not None
    assert json.loads(thief.stdout.readline())["held"] == 88
    layout = ("--nodes=1", "--tensor-parallel-size=2", "--nodelist=n3")
    shared = ("--name", "alone", "--no-exclusive", "--mem", "8G")
    try:
        done = alice.hpc_serve(
            *("submit", "--model=8b", *layout, *shared, "--json"), env={"HPC_SERVE_MODEL": str(tiny_models / "8b")}
        )
        assert done.returncode == 0, done.stderr
        job_id = json.loads(done.stdout)["job_id"]
        yield alice.wait_until_ready("alone", job_id, START_S)
        alice.run("scancel", job_id)
        wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")
    finally:
        thief.kill()
        thief.wait()


@pytest.fixture(scope="module")
def variables(alice, on_one_host) -> dict[str, str]:
    """What `hpc-serve env` exports."""
    return json.loads(alice.hpc_serve_said("env", "alone", "--json"))["variables"]


@pytest.fixture(scope="module")
def gateway(alice, on_one_host) -> Iterator[dict[str, str]]:
    """The variables of a gateway of the owner's, on a port of the login host."""
    running = alice.cluster.popen(
        ["hpc-serve", "gateway", "alone", "--port", "0", "--wait", "2s"], user="alice", env=alice.environ
    )
    try:
        assert running.stdout is not None
        address = next(line for line in running.stdout if line.startswith("export OPENAI_BASE_URL="))
        key = (alice.home / ".hpc-serve" / "gateway" / "api_key").read_text().strip()
        yield {"OPENAI_BASE_URL": address.strip().partition("=")[2], "OPENAI_API_KEY": key}
    finally:
        running.terminate()
        running.wait()


def program(user: User, way: str, home: Path | None = None) -> tuple[bool, str]:
    """Ask by a program of ours; whether it was answered, and what was said."""
    env = {} if home is None else {"HPC_SERVE_HOME": str(home)}
    done = user.run(sys.executable, str(ASK_EVERY_WAY), way, "alone", PROMPT, env=env)
    assert not done.stderr, done.stderr
    return done.returncode == 0, done.stdout


def curl(user: User, exported: dict[str, str]) -> tuple[str, str]:
    """Ask by curl with exported variables; the status ("000" without an answer), and what curl said."""
    done = user.run("bash", "-c", CURL, env={"BODY": BODY, **exported})
    return done.stdout, done.stderr


def secrets_of(alice: User) -> tuple[str, ...]:
    key = (alice.home / ".hpc-serve" / "services" / "alone" / "api_key").read_text().strip()
    assert len(key) > 30
    return key, PROMPT, "authorization"


@contextmanager
def strangers_program(mallory: User, node: str, what: str, *arguments: object) -> Iterator[Callable[[], Any]]:
    """Run one of his programs on a node while it listens; the value ends it and returns what it heard."""
    enough = mallory.home / f"enough-{what}"
    enough.unlink(missing_ok=True)
    argv = [sys.executable, str(STRANGER), what, *map(str, arguments), str(enough)]
    running = mallory.cluster.popen(argv, user="mallory", node=node, env=mallory.environ)

    def end() -> Any:
        enough.touch()
        return json.loads(running.communicate(timeout=100)[0].splitlines()[-1])

    try:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline()) == {"listens": True}
        yield end
    finally:
        running.kill()
        running.wait()


class TestOneHost:
    def test_all_but_the_engines_port_are_on_the_loopback_address(self, alice, on_one_host):
        seen = [entry for entry in listening(alice, "n3") if entry[1] != on_one_host["port"]]
        assert len(seen) >= 10, seen
        assert [entry for entry in seen if entry[0] != "127.0.0.1"] == []

    def test_endless_headers_and_half_requests_cost_little(self, alice, mallory, on_one_host):
        at = endpoint(on_one_host)
        before = api_server_kib(alice)
        assert tries(mallory, "endless_headers", *at, 4 << 30, node="n1")["sent"] < 1 << 30
        told = tries(mallory, "leave_open", *at, "GET /health HTT", 700, node="n1")
        assert told["closed"] == told["opened"] == 700
        assert answers(alice, "alone")
        assert api_server_kib(alice) - before < 200 << 10

    @pytest.mark.parametrize("said", ["", "\x16\x03\x01\x02"], ids=["silent", "a bit of a handshake"])
    def test_what_begins_no_tls_is_not_waited_for(self, alice, mallory, on_one_host, said):
        address, port, scheme = endpoint(on_one_host)
        assert scheme == "https"
        told = tries(mallory, "leave_open", address, port, "tcp", said, 300, node="n1")
        assert told["closed"] == told["opened"] == 300
        assert answers(alice, "alone")

    def test_a_stranger_fills_no_log(self, alice, mallory, on_one_host):
        log = Path(on_one_host["log_dir"]) / f"{on_one_host['job_id']}-node0.log"
        before = log.stat().st_size
        asked = tries(mallory, "flood_log", *endpoint(on_one_host), 1_000, node="n1")["asked"]
        assert asked == 1_000
        assert log.stat().st_size - before < 200_000, asked

    def test_the_batch_log_of_sbatch_by_hand_is_the_users_alone(self, alice, on_one_host):
        script = alice.write("by-hand.sh", stub_script("by-hand"))
        job_id = alice.sbatch(script)
        record = alice.wait_until_ready("by-hand", job_id, 300)
        assert record["state"] == "ready"
        log = alice.home / f"hpc-serve-by-hand-{job_id}.log"
        assert log.stat().st_mode & 0o077 == 0
        alice.cancel(job_id)
        wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")


class TestEveryWayIn:
    """Three requests: with the right key, with none, and with a wrong one."""

    @pytest.mark.parametrize("way", ["sync", "async", "chat"])
    def test_our_programs_need_the_right_key(self, alice, mallory, on_one_host, way):
        """The stranger has a copy of the record, which is no secret."""
        assert program(alice, way) == (True, "answered\n")
        home = copied_home(alice, mallory)
        key = home / "services" / "alone" / "api_key"
        key.unlink()
        was_answered, said = program(mallory, way, home)
        assert not was_answered
        assert "has no API key" in said
        key.write_text(WRONG_KEY)
        key.chmod(0o600)
        os.chown(key, *owner_ids(mallory))
        was_answered, said = program(mallory, way, home)
        assert not was_answered
        assert "another API key" in said

    def test_curl_needs_the_right_key(self, alice, mallory, variables):
        assert curl(alice, variables) == ("200", "")
        assert set(variables) >= {"OPENAI_API_KEY", "CURL_CA_BUNDLE"}
        bundle = Path(shutil.copy(variables["CURL_CA_BUNDLE"], mallory.cluster.shared / "bundle.pem"))
        bundle.chmod(0o644)
        known = {"OPENAI_BASE_URL": variables["OPENAI_BASE_URL"], "CURL_CA_BUNDLE": str(bundle)}
        assert curl(mallory, known) == ("401", "")
        assert curl(mallory, {**known, "OPENAI_API_KEY": WRONG_KEY}) == ("401", "")

    def test_the_gateway_on_a_port_needs_its_key(self, alice, mallory, gateway, variables):
        known = {"OPENAI_BASE_URL": gateway["OPENAI_BASE_URL"]}
        assert curl(alice, gateway) == ("200", "")
        assert curl(mallory, known) == ("401", "")
        assert curl(mallory, {**known, "OPENAI_API_KEY": WRONG_KEY}) == ("401", "")
        assert gateway["OPENAI_API_KEY"] != variables["OPENAI_API_KEY"]
        assert curl(mallory, {**known, "OPENAI_API_KEY": variables["OPENAI_API_KEY"]}) == ("401", "")


class TestHisCommands:
    def test_what_he_stops_scales_wakes_and_forgets_is_his_own(self, alice, mallory, on_one_host):
        """In the owner's home, and in a copy of it with all but the key."""
        folder = alice.home / ".hpc-serve" / "services" / "alone"
        before = sorted(path.name for path in folder.rglob("*"))
        copied = copied_home(alice, mallory)
        job_id = on_one_host["job_id"]
        for home in (alice.home / ".hpc-serve", copied):
            for words in (
                ("stop", "alone", "--now"),
                ("stop", job_id, "--now"),
                ("scale", "alone", "2"),
                ("wake", "alone"),
            ):
                mallory.hpc_serve(*words, env={"HPC_SERVE_HOME": str(home)})
            mallory.hpc_serve("forget", "--ended", env={"HPC_SERVE_HOME": str(home)})
        mallory.run("scancel", "--user", "mallory")
        refused = mallory.run("scancel", job_id)
        assert "denied" in refused.stderr
        assert sorted(path.name for path in folder.rglob("*")) == before
        assert alice.is_queued(job_id)
        assert alice.record("alone", job_id)["state"] == "ready"
        assert answers(alice, "alone")


class TestRelay:
    """The record names a port of the stranger's, who passes all on to the engine, as after a replica's end."""

    def test_a_relay_to_the_very_engine_reads_nothing(self, alice, mallory, on_one_host):
        host, port, _ = endpoint(on_one_host)
        with strangers_program(mallory, "n1", "relay", 23_457, host, port) as end:
            home = copied_home(alice, alice, hosts=["10.77.0.11"], port=23_457)
            for way in ("sync", "async", "chat"):
                assert program(alice, way, home) == (True, "answered\n")
            exported = json.loads(alice.hpc_serve("env", "alone", "--json", env={"HPC_SERVE_HOME": str(home)}).stdout)
            status, said = curl(alice, exported["variables"])  # it checks the address, which is not in the certificate
            assert status == "000"
            assert "SSL" in said
            heard = end()["heard"]
        assert len(heard) > 1_000
        assert not [secret for secret in secrets_of(alice) if secret.lower() in heard.lower()]

    @pytest.mark.parametrize("way", ["sync", "async", "chat"])
    def test_a_relay_in_the_place_of_another_replica_is_refused(
        self, alice, mallory, on_one_host, own_certificate, way
    ):
        host, port, _ = endpoint(on_one_host)
        other = (Path(own_certificate) / "node.pem").read_text()
        with strangers_program(mallory, "n1", "relay", 23_457, host, port) as end:
            home = copied_home(alice, alice, hosts=["10.77.0.11"], port=23_457, certificate=other)
            was_answered, said = program(alice, way, home)
            heard = end()["heard"]
        assert not was_answered
        assert "does not show the certificate of the record" in said
        assert heard
        assert not [secret for secret in secrets_of(alice) if secret.lower() in heard.lower()]


class TestBeforeTheStart:
    """What the stranger made ready for a start, on the node and on the shared file system."""

    def test_who_listens_on_the_engines_port_before_it_gets_nothing(self, alice, mallory, own_certificate):
        with strangers_program(mallory, "n2", "record_all", 23_456, own_certificate) as end:
            script = layout_script("early", model="8b", engine_args=("--port", "23456"))
            script = script.replace("for attempt in 1 2 3; do", "for attempt in 3; do")  # none is left after it
            job_id = alice.sbatch(alice.write("early.sh", script), "--nodelist=n2")
            alice.wait_until_over(job_id, 400)
            heard = end()
        record = alice.record("early", job_id)
        assert record["state"] == "failed", record
        assert "taken" in record["reason"], record
        key = (alice.home / ".hpc-serve" / "services" / "early" / "api_key").read_text().strip()
        assert not [secret for secret in (key, "authorization") if secret in heard["heard"].lower()]

    @pytest.mark.parametrize("whose", ["his folder", "a folder that all may write"])
    def test_his_words_for_the_engine_are_not_taken(self, alice, mallory, tiny_models, whose):
        folder = (mallory if whose == "his folder" else alice).home / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_models / "8b", folder)
        (folder / "hpc-serve-args.txt").write_text("--max-num-seqs 3")
        for path in (folder, *folder.iterdir()):
            os.chown(path, *owner_ids(mallory))
        if whose != "his folder":
            os.chown(folder, *owner_ids(alice))
            folder.chmod(0o777)
        mallory.home.chmod(0o755)
        env = {"HPC_SERVE_MODEL": str(folder)}
        done = alice.hpc_serve("submit", "--model=8b", "--name=words", env=env)
        assert done.returncode != 0
        assert "Its words decide what runs as you" in done.stderr
        job_id = alice.sbatch(alice.write("words.sh", layout_script("words", model="8b")), env=env)
        alice.wait_until_over(job_id)
        record = alice.record("words", job_id)
        assert record["state"] == "failed"
        assert "Its words decide what runs as you" in record["reason"]
        assert "engine command" not in alice.log("words", job_id)

    @pytest.mark.parametrize("variable", ["HOME", "TMPDIR", "CACHE_DIR", "LOG_DIR"])
    def test_his_folders_are_not_used(self, alice, mallory, variable):
        """The home is on the shared file system, the other folders are the node's own."""
        folder = str(mallory.home / "for-alice") if variable == "HOME" else "/tmp/for-alice"
        make = f"chmod 755 ~ && mkdir -p {folder} && chmod 777 {folder}"
        assert mallory.run("sh", "-c", make, node="n2").returncode == 0
        script = alice.write("folders.sh", layout_script("folders", model="8b"))
        output = alice.home / f"folders-{variable}.log"
        env = {f"HPC_SERVE_{variable}": folder}
        job_id = alice.sbatch(script, f"--output={output}", "--nodelist=n2", env=env)
        alice.wait_until_over(job_id)
        said = output.read_text() + alice.log("folders", job_id)
        assert re.search(r"belongs to user \d+ \(mallory\)", said), said
        assert mallory.run("ls", "-A", folder, node="n2").stdout == ""

    def test_his_folder_of_caches_was_passed_over(self, alice, mallory, on_one_host):
        """He had made it on the node before the engine started."""
        folder = f"/tmp/hpc-serve-cache-{owner_ids(alice)[0]}"
        assert folder in on_one_host["cache"]
        assert "not kept" in on_one_host["cache"]
        assert mallory.run("ls", "-A", folder, node="n3").stdout == ""


class TestAfterTheEnd:
    def test_who_takes_the_port_gets_nothing_by_any_way_in(
        self, alice, mallory, on_one_host, own_certificate, variables, gateway
    ):
        """All of the service is killed, so its record still says ready. A client and a gateway had talked to it."""
        go_on = alice.home / "go-on"
        go_on.unlink(missing_ok=True)
        argv = [sys.executable, str(ASK_EVERY_WAY), "kept", "alone", PROMPT, str(go_on)]
        kept = alice.cluster.popen(argv, user="alice", env=alice.environ)
        assert kept.stdout is not None
        assert kept.stdout.readline() == "answered once\n"
        assert curl(alice, gateway)[0] == "200"
        alice.kill_at_once()
        with strangers_program(mallory, "n3", "record_all", on_one_host["port"], own_certificate) as end:
            assert alice.record("alone", on_one_host["job_id"])["state"] == "ready"
            go_on.touch()
            assert kept.wait(300) == 1, kept.stdout.read()
            for way in ("sync", "async", "chat"):
                was_answered, said = program(alice, way)
                assert not was_answered, said
            assert curl(alice, variables)[0] == "000"
            assert curl(alice, gateway)[0] == "503"
            alice.hpc_serve("status", "alone")
            assert alice.hpc_serve("env", "alone").returncode != 0
            heard = end()
        assert heard["connections"] > 3
        assert not [secret for secret in secrets_of(alice) if secret.lower() in heard["heard"].lower()]


def owner_ids(user: User) -> tuple[int, int]:
    found = user.home.stat()
    return found.st_uid, found.st_gid


def copied_home(alice: User, user: User, **changes: object) -> Path:
    """A copy of the owner's home of services for a user, with a record that says something else."""
    copy = user.home / "copied"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(alice.home / ".hpc-serve", copy, ignore=shutil.ignore_patterns("logs", "jobs", "gateway", "*.sock"))
    service = copy / "services" / "alone"
    for record in service.glob("*.json"):
        record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    for path in (copy, *copy.rglob("*")):
        os.chown(path, *owner_ids(user))
    return copy


def api_server_kib(alice: User) -> int:
    """The resident memory of the process that serves HTTP on n3."""
    pid = alice.run("sh", "-c", "pgrep -o -f '[v]llm serve'", node="n3").stdout.split()[0]
    return int(alice.run("ps", "-o", "rss=", "-p", pid, node="n3").stdout)
