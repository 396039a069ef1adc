"""Starts stub engines (tests/support/stub_engine.py) as real processes and publishes records for them, for tests."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.certificates import RunCertificate, make_run_certificate

SCRIPT = Path(__file__).with_name("stub_engine.py")


def make_record(**fields: Any) -> EndpointRecord:
    """A record like the launcher's, of a replica that is ready, with the fields given."""
    now = time.time()
    usual: dict[str, Any] = {
        "service": "405b",
        "model": "meta-llama/Llama-3.1-405B-Instruct",
        "served_model_names": ("meta-llama/Llama-3.1-405B-Instruct", "405b"),
        "cluster": "slurm",
        "job_id": "123",
        "user": "alice",
        "state": "ready",
        "stage": "ready",
        "hosts": ("127.0.0.1",),
        "port": 1,
        "started_at": now,
        "updated_at": now,
        "signs": True,
    }
    return EndpointRecord(**{**usual, **fields})


def make_submitted(**fields: Any) -> SubmittedJob:
    """A job as `submit` writes it down, with the fields given."""
    usual = {"service": "405b", "model": "m", "cluster": "slurm", "job_id": "7", "submitted_at": time.time()}
    return SubmittedJob(**{**usual, **fields})


class StubEngine:
    """A stub engine's process, up and listening on `port` once made. Without a `certificate` it speaks no TLS."""

    def __init__(
        self,
        *flags: str,
        key_file: Path | None = None,
        drain_file: Path | None = None,
        certificate: RunCertificate | None = None,
    ) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HPC_SERVE_")}
        self.certificate = certificate.certificate if certificate is not None else ""
        if certificate is not None:
            tls = ("--ssl-keyfile", str(certificate.key_file), "--ssl-certfile", str(certificate.certificate_file))
            flags = (*tls, *flags)
        if key_file is not None:
            environ["HPC_SERVE_API_KEY_FILE"] = str(key_file)
        if drain_file is not None:
            environ["HPC_SERVE_DRAIN_FILE"] = str(drain_file)
        argv = [sys.executable, str(SCRIPT), "serve", "m", "--host", "127.0.0.1", "--port", "0", *flags]
        self.process = subprocess.Popen(
            argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self.port = self._read_port()
        self.drain_file = drain_file

    def _read_port(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"server on https?://\S+:(\d+)", line):
                return int(match[1])
        raise RuntimeError(f"the stub engine ended with {self.process.wait()} before it listened")

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


class StubService:
    """A service of stub engines in a store of its own."""

    def __init__(self, home: Path, service: str = "405b") -> None:
        self.store = ServiceStore(home)
        self.service = service
        self.key_file = self.store.ensure_api_key(service)
        self.engines: list[StubEngine] = []

    def start(self, *flags: str, **fields: Any) -> StubEngine:
        """One more replica, ready; `fields` are of its record."""
        place = len(self.engines)
        engine = StubEngine(
            *("--served-model-name", "meta-llama/Llama-3.1-405B-Instruct", "405b"),
            *flags,
            key_file=self.key_file,
            drain_file=self.store.home / f"drain-{place}",
            certificate=self.certificate(),
        )
        self.engines.append(engine)
        self.publish(engine, **fields)
        return engine

    def certificate(self) -> RunCertificate:
        """A certificate of the home's authority, for one more run."""
        folder = self.store.home / "jobs" / f"{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700, parents=True)
        return make_run_certificate(self.store.home, folder, run="stub", addresses=["127.0.0.1"])

    def publish(self, engine: StubEngine, **fields: Any) -> EndpointRecord:
        """Write a record for an engine, as its launcher would."""
        place = self.engines.index(engine)
        usual: dict[str, Any] = {"service": self.service, "job_id": str(100 + place), "counter": 1}
        usual |= {"port": engine.port, "certificate": engine.certificate}
        record = make_record(**{**usual, **fields})
        self.store.write(record)
        return record

    def renew(self, record: EndpointRecord, **changes: Any) -> EndpointRecord:
        record = replace(record, counter=record.counter + 1, updated_at=time.time(), **changes)
        self.store.write(record)
        return record

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
