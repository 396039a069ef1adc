"""What tests of certificates share: a home, the certificate of a run in it, and servers that show one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hpc_serve.trust.certificates import RunCertificate, make_run_certificate
from tests.support.tls_servers import RecordingServer, server_context


def made_in(home: Path, folder: Path) -> RunCertificate:
    """Make the certificate of a run whose private folder is `folder`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return make_run_certificate(home, folder, run="123-r0", addresses=["10.77.0.11", "fd00::11"])


def serving(shown: RunCertificate) -> closing[RecordingServer]:
    return closing(RecordingServer(server_context(shown.certificate_file, shown.key_file)))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "job"


@pytest.fixture
def ours(home: Path, folder: Path) -> RunCertificate:
    return made_in(home, folder)
