"""Programs in front of a service, which the load asks in place of `hpc_serve.client`: our gateway, or vllm-router.

The load is the same plain OpenAI clients for each. vllm-router cannot be given the certificate of a run, so it asks
each replica through a port in the clear (tests/support/plain_ports.py). It knows the addresses that it is started
with, and sends the key that its client has. Its settings are those that lose the least.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.record import EndpointRecord
from tests.cluster import wait_for
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.outcomes import Outcome
from tests.faults.run import run_fault
from tests.faults.service import START_S, Service
from tests.faults.short import BOUND_S, SHORT_HOLD_S
from tests.support.plain_ports import PlainPorts

FRONTS = ("gateway", "vllm-router")
ROUTER_SETTINGS = (
    *("--policy", "round_robin", "--cb-failure-threshold", "1"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "1"),
)
# The faults of replicas. Those of records and of our gateway say nothing of a program that knows neither.
USUAL = ("nothing", "engine-killed", "worker-killed", "engine-stopped", "engine-hung", "stop", "stop-now")
AT_ONCE = 2


class FrontedService(Service):
    """A service whose load goes through one front. `router` is the program vllm-router."""

    def __init__(self, front: str, router: str, *args: Any, **options: Any) -> None:
        self._name_of_front, self._router = front, router
        self._front: subprocess.Popen[bytes] | None = None
        self._address: tuple[str, ...] = ()
        self._plain: PlainPorts | None = None
        super().__init__(*args, **options)

    def load_argv(self, *options: str) -> list[str]:
        return super().load_argv("--gateways", "0", *self._address, *options)

    def start_load(self, *args: Any, **options: Any) -> None:
        log = self.folder / "front.log"
        argv, base_url, key_file = self._gateway() if self._name_of_front == "gateway" else self._vllm_router()
        with log.open("wb") as out:
            self._front = self.popen_to(out, argv)
        front = self._front

        def is_there() -> bool:
            if front.poll() is not None:
                raise RuntimeError(f"{argv[0]} ended with {front.returncode}: {log.read_text()[-2000:]}")
            return re.search(base_url, log.read_text()) is not None

        wait_for(is_there, START_S, what=self._name_of_front)
        found = re.search(base_url, log.read_text())
        assert found
        self._address = ("--base-url", f"http://{found[1]}/v1", "--api-key-file", str(key_file))
        super().start_load(*args, **options)

    def popen_to(self, out: Any, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        environ = {**self.whole_environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def _gateway(self) -> tuple[list[str], str, Path]:
        """What to start, what it says once it is there (its address is the first group), and the key to show it."""
        key_file = self.folder / "front.key"
        argv = [sys.executable, "-m", "hpc_serve.cli", "gateway", self.name, "--port", "0", "--key-file", str(key_file)]
        return argv, r"OPENAI_BASE_URL=http://(\S+)/v1", key_file

    def _vllm_router(self) -> tuple[list[str], str, Path]:
        texts = {str(path): path.read_text() for path in sorted(self.records())}
        records = [from_json_text(EndpointRecord, text, source=path) for path, text in texts.items()]
        self._plain = PlainPorts(records)
        workers = [f"http://127.0.0.1:{port}" for port in self._plain.ports]
        ports = ("--port", str(_free_port()), "--prometheus-port", str(_free_port()))
        argv = [self._router, "--host", "127.0.0.1", *ports, "--worker-urls", *workers, *ROUTER_SETTINGS]
        return argv, r"Starting server on (\S+)", self.service_folder / "api_key"

    def close(self) -> None:
        if self._front is not None:
            self._front.kill()
            self._front.wait()
        if self._plain is not None:
            self._plain.close()
        super().close()


def run_front(folder: Path, front: str, *, router: str, only: Sequence[str] = ()) -> list[Outcome]:
    """What became of the load through one front, for each of the faults named, or of the usual ones."""
    model = folder / "model"
    make_demo_model(model)

    def run(fault: Fault) -> Outcome:
        where = folder / front / fault.name
        hold_s = min(fault.hold_s, SHORT_HOLD_S)
        make = partial(FrontedService, front, router, where, model, fault, hold_s=hold_s, bound_s=BOUND_S)
        return run_fault(fault, make)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, [FAULTS[name] for name in only or USUAL]))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
