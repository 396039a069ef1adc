"""Whole runs on this machine, as their script starts them: how they end, what they copy, how they share a node.

Real bash, launcher and files; the engine is the stub.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import hpc_serve.client
from hpc_serve.exit_codes import PREFLIGHT_EXIT_CODE
from hpc_serve.job.engine.health import requests_under_way
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.certificates import make_run_certificate
from tests.cluster import wait_for
from tests.cluster.processes import variable_of
from tests.support.local_run import Run
from tests.support.stubs import SCRIPT
from tests.unit.diagnose.cases_of_logs import cause_in
from tests.unit.job.conftest import address_of, safetensors

WORDS = 10


@pytest.fixture
def hang_file(tmp_path):
    """While it exists no stream goes on."""
    return tmp_path / "hang"


@pytest.fixture
def run(start, hang_file):
    flags = ("--stub-words", str(WORDS), "--stub-hang-file", str(hang_file))
    return start(*flags, variables={"HPC_SERVE_CANARY_S": "0"})


def test_a_stranger_who_lists_processes_does_not_learn_the_engines_port_before_it_listens(run):
    seen: list[list[str]] = []

    def is_ready() -> bool:
        seen.extend(run.processes().values())
        return run.record is not None and run.record.state == "ready"

    wait_for(is_ready, 60, what="ready")
    seen.extend(run.processes().values())  # the engine may have begun, and become ready, since the last look
    port = re.compile(rf"(?<![0-9a-f]){run.record.port}(?![0-9a-f])")  # a name by chance may hold its digits
    assert not [words for words in seen for word in words if port.search(word)]
    engine = next(words for words in seen if "--middleware" in words)
    assert engine[engine.index("--port") + 1] == "0"


def test_a_home_that_is_moved_away_is_not_made_anew_and_is_written_again_when_it_is_back(run, tmp_path):
    home, away = run.store.home, tmp_path / "away"
    before = run.wait_for_state("ready")
    client = hpc_serve.client.connect("8b", home=home)
    home.rename(away)
    (log,) = ServiceStore(away).log_dir("8b").glob("*-node0.log")
    wait_for(lambda: f"{home} is gone" in log.read_text(), 60, what="the launcher says that its home is gone")
    assert client.completions.create(model=client.model, prompt="1").choices
    assert not home.exists()
    away.rename(home)
    log = home / log.relative_to(away)
    wait_for(lambda: "the record is written again" in log.read_text(), 60, what="the record is written again")
    assert log.read_text().count("is gone") == 1
    after = run.wait_for_state("ready")
    assert (after.port, after.state_since) == (before.port, before.state_since)
    assert after.counter > before.counter


def test_another_program_that_answers_in_the_engines_place_is_a_port_clash_that_is_told_and_tried_again(
    start, tmp_path
):
    """It is the stub that shows the certificate of another run."""
    other = make_run_certificate(tmp_path / "other", tmp_path, run="1-r0", addresses=[])
    shown = f"--ssl-certfile {other.certificate_file} --ssl-keyfile {other.key_file}"
    stages = set()
    run = start(variables={"STUB_ENGINE_ARGS": shown})

    def is_over() -> bool:
        if run.record is not None:
            stages.add((run.record.state, run.record.stage))
        return run.process.poll() is not None

    wait_for(is_over, 180, what="the end")
    record = run.record
    assert run.process.returncode == 75
    assert "attempt 3 met a port" in run.log.read_text()
    assert ("starting", "starting again with other ports") in stages
    assert (record.state, record.exit_code, record.failed_part) == ("failed", 75, "engine")
    assert record.reason.startswith(f"the server is up, but another program answers at 127.0.0.1:{record.port}")


def ctrl_c(run: Run) -> None:
    """The terminal signals the script and its launcher, not the engine, which has a session of its own."""
    os.killpg(run.process.pid, signal.SIGINT)


def kill(run: Run) -> None:
    run.process.send_signal(signal.SIGTERM)


def signal_all(run: Run) -> None:
    """As Slurm does it: the launcher and the engine get `--signal`'s USR1 and SIGTERM, and the script does not."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for pid, words in run.processes().items():
            if {"hpc_serve.job", str(SCRIPT)} & set(words):
                os.kill(pid, number)


@pytest.mark.parametrize(
    ("end", "who"),
    [(ctrl_c, "SIG"), (kill, "SIGTERM"), (signal_all, "SIGTERM")],
    ids=["ctrl-c", "kill", "all processes"],
)
def test_streams_under_way_finish_and_the_script_ends_well(run, hang_file, end: Callable[[Run], None], who):
    run.wait_for_state("ready")
    hang_file.touch()
    with ThreadPoolExecutor(3) as pool:
        streams: list[Future[int]] = [pool.submit(run.stream) for _ in range(3)]
        try:
            wait_for(lambda: requests_under_way(address_of(run.store, "8b")) == 3, 60, what="three streams")
            end(run)
            wait_for(lambda: run.record and run.record.stage == "finishing 3 requests", 60, what="the drain")
        finally:
            hang_file.unlink()
        assert [stream.result(60) for stream in streams] == [WORDS] * 3
    assert run.process.wait(60) == 0, run.log.read_text()
    record = run.wait_for_state("stopped")
    assert record.reason.startswith(who)
    assert record.reason.endswith("; 3 requests under way finished")
    assert not list(run.store.service_dir("8b").glob("*.drain"))


# -- an engine that loads a copy of the model


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder of one file of weights."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(os.urandom(100_000)))
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "scratch").mkdir(mode=0o700)
    return tmp_path / "scratch"


@pytest.fixture
def staged(start, model, root) -> Run:
    variables = {"HPC_SERVE_MODEL": str(model), "HPC_SERVE_STAGE": str(root), "HPC_SERVE_CANARY_S": "0"}
    return start(variables=variables)


def copies(root: Path) -> list[Path]:
    return sorted(root.glob("hpc-serve-stage-*/*"))


def test_the_engine_loads_the_copy_which_goes_with_the_run(staged, model, root):
    record = staged.wait_for_state("ready")
    (copy,) = [path for path in copies(root) if path.is_dir()]
    (engine,) = staged.engines()
    words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    assert words[words.index("serve") + 1] == str(copy)
    assert (copy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert "staging" in record.start.took_s
    assert record.loading == f"vLLM's default (lazy): from the copy {copy} on the node"
    assert "meta-llama/Llama-3.1-8B-Instruct" in record.served_model_names
    assert "staging " in staged.node_log()
    ctrl_c(staged)
    staged.process.wait()
    assert staged.wait_for_state("stopped")
    assert copies(root) == []


def test_a_run_that_is_killed_leaves_no_copy(staged, root):
    staged.wait_for_state("ready")
    assert copies(root)
    os.killpg(staged.process.pid, signal.SIGKILL)
    wait_for(lambda: not copies(root), 180, what="the copy is removed")


# -- several replicas in one job (under Slurm: tests/e2e/test_replicas_per_job.py)

DEVICES = ("GPU-5ac1", "GPU-07b2", "MIG-11aa", "MIG-22bb")


@pytest.fixture
def shared(start) -> Run:
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES)}
    return start(replicas_per_job=2, gpus_per_node=4, engine_restarts=0, variables=variables)


def engine_of(run: Run, replica: int) -> int:
    """The pid of a replica's engine."""
    (pid,) = (pid for pid in run.engines() if devices_of(pid) == DEVICES[2 * replica : 2 * replica + 2])
    return pid


def devices_of(pid: int) -> tuple[str, ...]:
    return tuple(variable_of(pid, "CUDA_VISIBLE_DEVICES").split(","))


def test_each_replica_has_its_own(shared):
    first, second = shared.wait_for_states("ready", "ready")
    assert (first.job_id, first.replicas_per_job, first.gpus_per_node) == (second.job_id, 2, 2)
    assert first.port != second.port
    assert first.certificate != second.certificate
    cores = [os.sched_getaffinity(engine_of(shared, replica)) for replica in range(2)]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    logs = {path.name for path in shared.store.log_dir("8b").iterdir()}
    assert logs == {f"{first.job_id}-{replica}-node0.log" for replica in range(2)}


def test_without_a_list_of_devices_none_is_invented(start):
    run = start(replicas_per_job=2, gpus_per_node=4, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert run.process.wait(60) == 2, run.log.read_text()
    for record in run.wait_for_states("failed", "failed"):
        assert "divide the GPUs that CUDA_VISIBLE_DEVICES lists" in str(record.reason)


# -- runs that end with their preflight


def test_weights_that_are_cut_short_end_the_start_before_the_engine(start, model):
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 50)
    run = start(variables={"HPC_SERVE_MODEL": str(model)})
    assert run.process.wait(180) == PREFLIGHT_EXIT_CODE, run.log.read_text()
    record = run.record
    assert (record.state, record.failed_part, record.exit_code) == ("failed", "preflight", PREFLIGHT_EXIT_CODE)
    found = cause_in(str(record.reason))
    assert f"model.safetensors has {size - 50:,} of its {size:,} bytes" in found.cause
    assert found.cure.startswith("Download it again")
    assert "engine command" not in run.node_log()
    assert len(list(run.store.service_dir("8b").glob("*.preflight"))) == 1


def test_a_run_that_only_looks_at_its_nodes_ends_well_and_starts_nothing(start, model):
    run = start(variables={"HPC_SERVE_MODEL": str(model)}, preflight_only=True)
    assert run.process.wait(180) == 0, run.log.read_text()
    assert (run.record.state, run.record.exit_code) == ("stopped", 0)
    assert str(run.record.reason).startswith("preflight of 1 node in ")
    assert "engine command" not in run.node_log()
