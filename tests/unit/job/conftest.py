from __future__ import annotations

import asyncio
import inspect
import json
import logging

import pytest

from hpc_serve.job.engine.health import EngineAddress
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.certificates import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import Identity
from tests.support.local_run import Run

KEY = "k-0123456789abcdef"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run an asynchronous test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def safetensors(content: bytes) -> bytes:
    """A file of weights with one tensor of these bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    return len(header).to_bytes(8, "little") + header + content


def address_of(store: ServiceStore, service: str) -> EngineAddress:
    """Where the engine of the service's only replica is asked, by its record."""
    (record,) = store.read(service).records
    identity = Identity.of(record, store.read_api_key(service))
    return EngineAddress(host="127.0.0.1", port=record.port, identity=identity)


@pytest.fixture
def certificate(tmp_path) -> RunCertificate:
    """The certificate of a run on this host."""
    return make_run_certificate(tmp_path / "home", tmp_path, run="1-r0", addresses=["127.0.0.1"])


def tls_options(certificate: RunCertificate) -> dict[str, str]:
    """The options of a uvicorn server that shows it."""
    return {"ssl_keyfile": str(certificate.key_file), "ssl_certfile": str(certificate.certificate_file)}


@pytest.fixture
def environ(tmp_path):
    """The environment of a local run, before it is prepared."""
    return {"HPC_SERVE_HOME": str(tmp_path / "home"), "HPC_SERVE_CLUSTER": "local", "HPC_SERVE_JOB_ID": "local-1"}


@pytest.fixture
def start(tmp_path):
    """Starts a whole run in a folder; it is ended with the test."""
    runs: list[Run] = []

    def start(*flags: str, folder=tmp_path, **options) -> Run:
        runs.append(Run(folder, *flags, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(autouse=True)
def _log_as_before():
    """A program under test sets up logging for its whole process; vLLM's app lets nothing below ERROR through."""
    logger = logging.getLogger("hpc_serve")
    handlers, level, root_level = logger.handlers, logger.level, logging.root.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
    logging.root.setLevel(root_level)


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    """The file of the key KEY that a gate asks for."""
    path = tmp_path / "api_key"
    path.write_text(KEY + "\n")
    monkeypatch.setenv("HPC_SERVE_API_KEY_FILE", str(path))
    monkeypatch.delenv("HPC_SERVE_DRAIN_FILE", raising=False)
    return path
