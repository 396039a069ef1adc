"""A whole run on this machine, as its script starts it: real bash, launcher and files; the engine is the stub."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hpc_serve.client
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from tests.cluster import processes, wait_for
from tests.support.stubs import SCRIPT


class Run:
    """A script of one service, started in a session of its own as `submit --cluster local` starts it.

    `flags` are of the stub engine, `options` of the request, `variables` of the job's environment.
    """

    def __init__(self, folder: Path, *flags: str, variables: Mapping[str, str] | None = None, **options: Any) -> None:
        self.store = ServiceStore(folder / "home")
        request = ServeRequest(
            model="8b",
            service="8b",
            cluster="local",
            environment=Environment(kind="none"),
            engine_args=flags,
            allow_unknown_vllm_options=True,
            **options,
        )
        text = render_script(request, plan_service(request))
        script = folder / "script.sh"
        script.write_text(text.replace("vllm serve", f"{sys.executable} {SCRIPT} serve"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HPC_SERVE_")}
        environ |= {
            "HPC_SERVE_HOME": str(self.store.home),
            "HPC_SERVE_CACHE_SIZE": "0",
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody: no hub is asked for the weights that the stub does not need
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **(variables or {}),
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

    @property
    def states(self) -> dict[int, str]:
        """The state of each replica of the job that has a record, by its number."""
        return {record.replica: record.state for record in self.store.read("8b").records}

    def wait_for_states(self, *states: str) -> list[EndpointRecord]:
        """The records of all replicas, by their numbers, once they are in these states."""

        def look() -> list[EndpointRecord] | None:
            found = sorted(self.store.read("8b").records, key=lambda record: record.replica)
            has_them = [record.state for record in found] == list(states)
            assert has_them or self.process.poll() is None, (self.states, self.log.read_text(), self.node_log())
            return found if has_them else None

        return wait_for(look, 180, what=", ".join(states))

    def wait_for_state(self, state: str) -> EndpointRecord:
        return self.wait_for_states(state)[0]

    def stream(self) -> int:
        """How many words came of one stream."""
        client = hpc_serve.client.connect("8b", home=self.store.home, wait=60)
        chunks = client.completions.create(model=client.model, prompt="1", stream=True)
        return sum(1 for chunk in chunks if chunk.choices)

    def node_log(self) -> str:
        """What the launcher and the engine have said."""
        return "".join(path.read_text() for path in self.store.log_dir("8b").glob("*-node0.log"))

    def processes(self) -> dict[int, list[str]]:
        """The command lines of its processes, by their numbers."""
        ours = f"HPC_SERVE_HOME={self.store.home}"
        return {pid: _words(pid, "cmdline") for pid in processes.pids() if ours in _words(pid, "environ")}

    def engines(self) -> list[int]:
        """The stub engine's processes."""
        return [pid for pid, words in self.processes().items() if words[1:3] == [str(SCRIPT), "serve"]]

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            for pid in self.engines():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
