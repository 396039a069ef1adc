"""A copy of the model on a node's own disk or in its memory, from which the engine loads (HPC_SERVE_STAGE).

It decides what is copied, where to, and whether there is room. Runs on one node that load the same files share one
copy: each holds a lock on it, the first of them copies, the last one removes it. The sweep process beside the launcher
removes the leftovers of a killed run; else the sweep of the next run does.

Several readers copy at once, in blocks: one stream seldom gets all that a filesystem gives. Each byte is read once; the
copy is then checked by sizes and headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.given_files import open_regular
from hpc_serve.hub.local_weights import damaged_files, read_hub_settings, snapshot_folder, weight_files
from hpc_serve.hub.needed_files import RepositoryFile, needed_files
from hpc_serve.job.machine.guarded_folders import (
    READY,
    lock_beside,
    make_named_folder,
    others_file,
    remove_tree,
    remove_unless_locked,
)
from hpc_serve.job.machine.node_memory import available_memory
from hpc_serve.job.weights.stage_folder import VARIABLE
from hpc_serve.job.weights.weights_place import is_in_memory
from hpc_serve.rendezvous.store import default_home
from hpc_serve.units import GIB, MIB, readable_size
from hpc_serve.vllm.arguments import names_in, read_arguments, value_of
from hpc_serve.vllm.command import ServeCommand

_log = logging.getLogger(__name__)
_OnCopied = Callable[[int, int], None]

# -- the copy of bytes

_READERS = 8
_BLOCK_BYTES = 256 * MIB
_PIECE_BYTES = 8 * MIB


class CopyStoppedError(Exception):
    """The run ended while its model was copied."""


def copy_files(
    source: Path, target: Path, files: Sequence[RepositoryFile], *, on_copied: _OnCopied, stop: threading.Event
) -> None:
    """Copy files of `source` to `target`, with the content of links in place of links.

    `on_copied` is told how many bytes are copied, of all. Raises OSError, CopyStoppedError once `stop` is set.
    """
    total, copied, counting = sum(file.size_bytes for file in files), 0, threading.Lock()
    has_failed = threading.Event()

    def count(size: int) -> None:
        nonlocal copied
        with counting:
            copied += size
            on_copied(copied, total)

    def copy_block(file: RepositoryFile, at: int) -> None:
        end = min(at + _BLOCK_BYTES, file.size_bytes)
        buffer = memoryview(bytearray(min(_PIECE_BYTES, end - at)))
        with open_regular(source / file.path) as reader, (target / file.path).open("r+b") as writer:
            writer.seek(at)
            while at < end and not has_failed.is_set():
                if stop.is_set():
                    raise CopyStoppedError
                read = os.preadv(reader.fileno(), [buffer[: end - at]], at)
                if read == 0:
                    raise OSError(None, f"{source / file.path} has become shorter than {file.size_bytes:,} bytes")
                writer.write(buffer[:read])
                with contextlib.suppress(OSError):  # what was read is not needed again, the copy is
                    os.posix_fadvise(reader.fileno(), at, read, os.POSIX_FADV_DONTNEED)
                at += read
                count(read)

    for file in files:
        path = target / file.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(0o600, exist_ok=False)
        os.truncate(path, file.size_bytes)
    blocks = [(file, at) for file in files for at in range(0, file.size_bytes, _BLOCK_BYTES)]
    with ThreadPoolExecutor(_READERS) as readers:
        copies = [readers.submit(copy_block, file, at) for file, at in blocks]
        done, _ = wait(copies, return_when=FIRST_EXCEPTION)
        has_failed.set()
    for one in done:
        one.result()


# -- the copy of a model

_SPARE_BYTES = GIB
_PART_OF_MEMORY = 0.5
_POLL_S = 0.5


@dataclass(kw_only=True)
class Staging:
    """The copy of one run: of `files` of `source`, in `target`. It is held from `open` to `close`."""

    source: Path
    target: Path
    files: tuple[RepositoryFile, ...]
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: int | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_whole(self) -> bool:
        """Return whether the copy is there."""
        return (self.target / READY).is_file()

    def command(self, command: ServeCommand) -> ServeCommand:
        """Return the command of an engine that loads the copy, and answers to the model's own names."""
        names = () if "--served-model-name" in names_in(command.options) else ("--served-model-name", command.model)
        return replace(command, argv=(*command.start[:-1], str(self.target), *command.options, *names))

    def open(self, on_copied: _OnCopied) -> None:
        """Make the copy, or wait until another run has made it. `on_copied` is told the bytes that are there, of all.

        Raises DoesNotFitError where there is no room, InvalidRequestError where the folder cannot be used or a copy is
        not what was read, CopyStoppedError once `stop` is set.
        """
        try:
            while self._lock is None:
                if (alone := lock_beside(self.target)) is not None:
                    self._copy_under(alone, on_copied)
                elif (shared := lock_beside(self.target, shared=True)) is not None:
                    self._lock = self._kept_if_whole(shared)
                elif self.stop.wait(_POLL_S):
                    raise CopyStoppedError
        except OSError as error:
            raise _unusable(self.target.parent, error) from error

    def close(self) -> None:
        """Let go of the copy, and remove it if nobody else uses it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            remove_unless_locked(self.target)

    def _copy_under(self, lock: int, on_copied: _OnCopied) -> None:
        """Copy with an exclusive lock; then turn it into a shared lock."""
        try:
            if not self.is_whole or others_file(self.target) is not None:
                remove_tree(self.target)
                self._check_room()
                self.target.mkdir(mode=0o700)
                copy_files(self.source, self.target, self.files, on_copied=on_copied, stop=self.stop)
                self._verify()
                (self.target / READY).touch()
            fcntl.flock(lock, fcntl.LOCK_SH)  # for a moment it is nobody's
        except BaseException:
            remove_tree(self.target)
            os.close(lock)
            raise
        self._lock = self._kept_if_whole(lock)

    def _kept_if_whole(self, lock: int) -> int | None:
        """Return the lock if `target` still names the locked copy and the copy is whole; else close it."""
        with contextlib.suppress(OSError):
            is_same = os.path.samestat(os.fstat(lock), os.lstat(self.target.with_name(f"{self.target.name}.lock")))
            if is_same and self.is_whole and others_file(self.target) is None:
                return lock
        os.close(lock)
        return None

    def _check_room(self) -> None:
        root, needed = self.target.parent, self.total_bytes
        free = shutil.disk_usage(root).free
        advice = f"Set {VARIABLE} to a larger folder, or leave --stage out."
        if free < needed + _SPARE_BYTES:
            raise DoesNotFitError(
                f"--stage copies {readable_size(needed)} to {root}, which has {readable_size(free)} free, and 1 GiB "
                f"stays free. {advice}"
            )
        if is_in_memory(root) and needed > _PART_OF_MEMORY * (available := available_memory()):
            raise DoesNotFitError(
                f"--stage copies {readable_size(needed)} to {root}, which is memory, and {readable_size(available)} of "
                f"it are free for this job; at most half may be used. {advice}"
            )

    def _verify(self) -> None:
        wrong = [file.path for file in self.files if (self.target / file.path).stat().st_size != file.size_bytes]
        damaged = damaged_files(weight_files(self.target))
        if wrong or damaged:
            raise InvalidRequestError(
                f"the copy of {self.source} in {self.target.parent} is not what was read: "
                f"{'; '.join([*(f'{path} has another size' for path in wrong[:3]), *damaged[:3]])}. Were the files "
                "changed meanwhile? If not, look at the node's disk, or leave --stage out."
            )


async def stage(staging: Staging, on_copied: _OnCopied) -> None:
    """Open the copy in a thread, which stops if this is cancelled. Raises what `open` raises."""
    _log.info("staging %s to %s: %s", staging.source, staging.target, readable_size(staging.total_bytes))
    began_s = time.monotonic()
    try:
        await asyncio.to_thread(staging.open, on_copied)
    except asyncio.CancelledError:
        staging.stop.set()
        raise
    took_s = max(time.monotonic() - began_s, 1e-3)
    _log.info("staged in %.0f s, %s/s", took_s, readable_size(round(staging.total_bytes / took_s)))


def plan_staging(command: ServeCommand, base: Path, environ: Mapping[str, str]) -> Staging:
    """Return the copy of its model that a run wants below `base`; its folder is made.

    Raises InvalidRequestError, or PortsInUseError where another user has taken the folder's name.
    """
    model = command.weights
    if "--download-dir" in names_in(command.options):
        raise InvalidRequestError(
            "--stage and --download-dir: the model is looked for in HF_HOME alone; leave one out."
        )
    revision = str(value_of(read_arguments(command.options), "--revision") or "main")
    folder = (
        Path(model) if model.startswith("/") else snapshot_folder(read_hub_settings(environ).cache, model, revision)
    )
    files = _needed_of(folder) if folder is not None else ()
    if folder is None or not files:
        raise InvalidRequestError(
            f"--stage copies what the node sees, and {model} is not there: `hpc-serve fetch {model}` first, or leave "
            "--stage out."
        )
    listed = [[file.path, file.size_bytes, (folder / file.path).stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([os.path.realpath(folder), listed]).encode()).hexdigest()[:16]
    try:
        root = make_named_folder(base, "stage", default_home(environ), called=VARIABLE)
    except OSError as error:
        raise _unusable(base, error) from error
    return Staging(source=folder, target=root / key, files=files)


def _needed_of(folder: Path) -> tuple[RepositoryFile, ...]:
    """Return the files of a folder that an engine reads. Raises InvalidRequestError."""
    try:
        files = [
            RepositoryFile(path=str(path.relative_to(folder)), size_bytes=path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / READY
        ]
        weights = weight_files(folder)
        indexed = [str(path.relative_to(folder)) for path in weights if path.suffix == ".safetensors"]
    except OSError as error:
        raise InvalidRequestError(f"--stage: {folder} cannot be read on this node: {error}.") from error
    return needed_files(files, indexed)


def _unusable(folder: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model cannot be copied to {folder} (--stage): {error.strerror or error}"
        f"{f': {error.filename}' if error.filename else ''}. Set {VARIABLE} to another folder, or leave it out."
    )
