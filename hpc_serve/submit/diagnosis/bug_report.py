"""One file for a bug report: the diagnosis, the status, the script and the logs of a replica, without secrets.

Only what is listed here goes in, and all of it passes `hpc_serve.redact`: records, keys and certificates stay where
they are.
"""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hpc_serve
from hpc_serve.errors import StoreError
from hpc_serve.redact import redact
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.diagnosis.diagnosis import Diagnosis
from hpc_serve.submit.logs.log_files import both_ends, known_secrets

# Bytes of each log, from its beginning and from its end.
_HEAD_BYTES, _TAIL_BYTES = 2**20, 4 * 2**20
_LEFT_OUT = "… a part of this log was left out …\n"


def write_bundle(
    path: Path, diagnosis: Diagnosis, status: Mapping[str, Any], store: ServiceStore, environ: Mapping[str, str]
) -> list[str]:
    """Write a new private file `path` (tar, gzip); returns the names of what is in it. Raises StoreError."""
    secrets = known_secrets(diagnosis.status.service, store, environ)
    members = {name: redact(text, secrets) for name, text in _members(diagnosis, status, store)}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, text in members.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"hpc-serve-report/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                tar.addfile(entry, io.BytesIO(content))
    except FileExistsError:
        raise StoreError(f"{path} is there already: name another file.") from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error
    return list(members)


def _members(diagnosis: Diagnosis, status: Mapping[str, Any], store: ServiceStore) -> Iterator[tuple[str, str]]:
    yield "diagnosis.txt", f"{diagnosis.status.sentence}\n{diagnosis.report}\n"
    yield "status.json", json.dumps(status, indent=2, ensure_ascii=False) + "\n"
    yield (
        "versions.txt",
        f"hpc-serve {hpc_serve.__version__}\nPython {platform.python_version()}\n{platform.platform()}\n",
    )
    for path in diagnosis.logs:
        yield f"logs/{path.name}", _both_ends(path)
    for job in store.read_submitted(diagnosis.status.service):
        if job.job_id == diagnosis.status.job_id and job.script:
            yield "script.sh", _both_ends(Path(job.script))


def _both_ends(path: Path) -> str:
    """Return the text of a file; of a long one whole lines of both ends, since half a secret would not be found."""
    parts: list[bytes] = []
    last = 0
    try:
        for number, raw in both_ends(path, head_bytes=_HEAD_BYTES, tail_bytes=_TAIL_BYTES):
            is_cut = bool(parts) and not parts[-1].endswith(b"\n")
            if number > last + (not is_cut):
                while parts and not parts[-1].endswith(b"\n"):
                    parts.pop()
                parts.append(_LEFT_OUT.encode())
            last = number
            parts.append(raw)
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"
    return b"".join(parts).decode(errors="replace")
