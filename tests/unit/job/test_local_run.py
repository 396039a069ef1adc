"""A whole run on this machine, as its script starts it: what Ctrl-C, kill and a request to drain do to its streams.

Real bash, launcher and files; the engine is the stub.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import hpc_serve.client
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.planning import plan_service
from hpc_serve.submit.render import render_script
from hpc_serve.submit.request import Environment, ServeRequest
from tests.cluster import wait_for
from tests.support.stubs import SCRIPT

WORDS = 10
STREAM = ("--stub-words", str(WORDS), "--stub-word-s", "0.3")


class Run:
    """A script of one service, started in a session of its own as `submit --cluster local` starts it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.store = ServiceStore(folder / "home")
        request = ServeRequest(
            model="8b",
            service="8b",
            cluster="local",
            environment=Environment(kind="none"),
            engine_args=flags,
            allow_unknown_vllm_options=True,
        )
        text = render_script(request, plan_service(request))
        script = folder / "script.sh"
        script.write_text(text.replace("vllm serve", f"{sys.executable} {SCRIPT} serve"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HPC_SERVE_")}
        environ |= {
            "HPC_SERVE_HOME": str(self.store.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                ["bash", str(script)], env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self.log = folder / "log"

    @property
    def record(self) -> EndpointRecord | None:
        records = self.store.read("8b").records
        return records[0] if records else None

    def wait_for_state(self, state: str) -> EndpointRecord:
        def look() -> EndpointRecord | None:
            assert (self.record and self.record.state == state) or self.process.poll() is None, self.log.read_text()
            return self.record if self.record is not None and self.record.state == state else None

        return wait_for(look, 60, what=state)

    def stream(self) -> int:
        """How many words came of one stream."""
        client = hpc_serve.client.connect("8b", home=self.store.home)
        chunks = client.completions.create(model=client.model, prompt="1", stream=True)
        return sum(1 for chunk in chunks if chunk.choices)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path, *STREAM)
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()


def command_lines(run: Run) -> list[list[str]]:
    """What every user of the node can read of the run's processes."""
    ours, found = f"HPC_SERVE_HOME={run.store.home}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and ours in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().decode().split("\0"))
    return found


def test_a_stranger_who_lists_processes_does_not_learn_the_engines_port_before_it_listens(run):
    seen: list[list[str]] = []

    def is_ready() -> bool:
        seen.extend(command_lines(run))
        return run.record is not None and run.record.state == "ready"

    wait_for(is_ready, 60, what="ready")
    assert run.record is not None
    engine = next(words for words in seen if "--config" in words)
    assert not [words for words in seen for word in words if str(run.record.port) in word]
    port_file = Path(engine[engine.index("--config") + 1])
    assert port_file.read_text() == f"port: {run.record.port}\n"
    assert (port_file.stat().st_mode & 0o777, port_file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def ctrl_c(run: Run) -> None:
    """The terminal signals the script and its launcher, not the engine, which has a session of its own."""
    os.killpg(run.process.pid, signal.SIGINT)


def kill(run: Run) -> None:
    run.process.send_signal(signal.SIGTERM)


def signal_all(run: Run) -> None:
    """As scancel does it: the launcher and the engine get SIGTERM, and the script does not."""
    ours = f"HPC_SERVE_HOME={run.store.home}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and ours in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"hpc_serve.job" in words or str(SCRIPT).encode() in words:
                    os.kill(int(entry.name), signal.SIGTERM)


def ask(run: Run) -> None:
    record = run.record
    assert record is not None
    path = drain_file(run.store, "8b", job_id=record.job_id, restart=0, replica=0)
    ask_to_drain(path, DrainRequest(by="a test", deadline_s=60))


@pytest.mark.parametrize(
    ("end", "who"),
    [(ctrl_c, "SIG"), (kill, "SIGTERM"), (signal_all, "SIGTERM"), (ask, "a test")],
    ids=["ctrl-c", "kill", "all processes", "request"],
)
def test_streams_under_way_finish_and_the_script_ends_well(run, end: Callable[[Run], None], who):
    run.wait_for_state("ready")
    with ThreadPoolExecutor(3) as pool:
        streams: list[Future[int]] = [pool.submit(run.stream) for _ in range(3)]
        wait_for(lambda: run.record and _under_way(run) == 3, 20, what="three streams")
        end(run)
        assert [stream.result(60) for stream in streams] == [WORDS] * 3
    assert run.process.wait(60) == 0, run.log.read_text()
    record = run.wait_for_state("stopped")
    assert record.reason is not None
    assert record.reason.startswith(who)
    assert record.reason.endswith("; 3 requests under way finished")
    assert not list(run.store.service_dir("8b").glob("*.drain"))


def _under_way(run: Run) -> int | None:
    from hpc_serve.job.health import EngineAddress, requests_under_way
    from hpc_serve.trust.connection import Identity

    record = run.record
    assert record is not None
    identity = Identity.of(record, run.store.read_api_key("8b"))
    return requests_under_way(EngineAddress(host="127.0.0.1", port=record.port, identity=identity))
