"""How much of a node's memory a job asks for, where it does not take whole nodes: a sum of named parts. Pure.

Slurm counts what a job writes to /dev/shm, and to any other folder that is memory (tmpfs), as memory of the job. It
counts the weights and the cache that an engine keeps outside its GPUs as well. The preflight looks at what is there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hpc_serve.hub.local_weights import hub_cache
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.units import GIB

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan

# One rank with its threads, and what it shares with the others in /dev/shm; the API server, Ray and its object store.
_GIB_PER_GPU = 16
_GIB_BASE = 16
_GIB_OF_CACHES = 4
# A further API server with its cache of processed images, which is 4 GiB where --mm-processor-cache-gb is not given.
_GIB_PER_API_SERVER = 6
_GIB_OF_IMAGES = 4
_SHARED_MEMORY, _TMP = "/dev/shm", "/tmp"
# Tokenizer and further files of a model, beside its weights.
_GIB_BESIDE_WEIGHTS = 1
# The default of vLLM's SimpleCPUOffloadConnector.
_SIMPLE_OFFLOAD_BYTES = 8 * GIB
_ENGINE, _HALF = "engine processes", "room, since a copy may take half of the free memory"
_SLURM_SIZE = re.compile(r"(\d{1,15})([KMGT]?)B?", re.IGNORECASE)


def asked_parts(request: ServeRequest, plan: ServePlan) -> dict[str, int]:
    """Return the parts of what a job asks for; none where a person's own --mem wins, or whole nodes have all of it."""
    is_given = request.cluster != "slurm" or request.slurm.mem or has_whole_nodes(request, plan)
    return {} if is_given else memory_parts(request, plan)


def has_whole_nodes(request: ServeRequest, plan: ServePlan) -> bool:
    """Return whether the job has its nodes alone."""
    if request.slurm.exclusive is not None:
        return request.slurm.exclusive
    return plan.layout.num_nodes > 1 or plan.accelerator.kind != "gpu"


def memory_parts(request: ServeRequest, plan: ServePlan) -> dict[str, int]:
    """Return the GiB of each node by what they are for. Parts of 0 GiB are left out.

    The replicas of one job share the files in memory. Each has its own offloaded weights and cache.
    """
    settings, folders, layout = request.settings, request.memory_folders, plan.layout
    node = layout.gpus_per_node * request.replicas_per_job
    # Each data-parallel rank is an engine, of so many ranks, with a cache of its own.
    engine = layout.tensor_parallel_size * layout.pipeline_parallel_size
    files, api_servers = _weights_gib(plan), max(1, request.engine_option("--api-server-count") or 1)
    stage = settings.stage if settings.stage not in (None, "off") else None
    copy = (stage if stage.startswith("/") else settings.tmpdir or _TMP) if stage else None
    model = _model_folder(request)
    caches = settings.cache_dir or settings.tmpdir or _TMP
    found = {
        _ENGINE: _engine_gib(plan, node),
        "further API servers": _GIB_PER_API_SERVER * (api_servers - 1) * request.replicas_per_job,
        "processed images (--mm-processor-cache-gb)": _images_gib(request, api_servers) * request.replicas_per_job,
        "weights outside the GPUs (--cpu-offload-gb)": _gib(plan.memory.pinned_bytes * node),
        "cache outside the GPUs (KV offload)": _gib(_offloaded_cache_bytes(request, engine) * node / engine),
        f"compiled code in {caches}": _GIB_OF_CACHES if is_in_memory(caches, folders) else 0,
        f"the model in {model}": files if model and is_in_memory(model, folders) else 0,
    }
    if copy and is_in_memory(copy, folders):
        # The copy is made before the engine starts, and beside it the model alone is there (job/weights/staging.py).
        later = sum(found.values()) - found[f"the model in {model}"]
        found |= {f"a copy of the model in {copy} (--stage)": files, _HALF: max(0, files - later)}
    return {name: gib for name, gib in found.items() if gib}


def memory_sum(parts: Mapping[str, int]) -> str:
    """Return the sum in words; empty where a job keeps nothing in memory but its processes."""
    if not parts.keys() - {_ENGINE}:
        return ""
    return f"{sum(parts.values())} GiB of each node = {_listed(parts, ' + ')}"


def small_memory_note(request: ServeRequest, plan: ServePlan) -> str | None:
    """Return a warning if the --mem of a person is less than what the job keeps in it beside its processes.

    None where it is more, or where all memory of the nodes is asked for.
    """
    asked = _SLURM_SIZE.fullmatch(request.slurm.mem or "")
    if asked is None or not int(asked[1]) or request.cluster != "slurm":
        return None
    gib = int(asked[1]) * 1024.0 ** ("KMGT".index(asked[2].upper() or "M") - 2)
    parts = memory_parts(request, plan)
    kept = {name: size for name, size in parts.items() if name not in (_ENGINE, _HALF)}
    if gib >= sum(kept.values()):
        return None
    return (
        f"--mem {request.slurm.mem} is {gib:.4g} GiB of each node, and the job keeps {sum(kept.values())} GiB in it "
        f"beside its processes: {_listed(kept, ', ')}. The kernel will end the job: ask for --mem "
        f"{sum(parts.values())}G, or keep less in memory."
    )


def is_in_memory(folder: str, memory_folders: tuple[str, ...]) -> bool:
    """Return whether a folder of the nodes is memory: /dev/shm, and the folders that the site names.

    >>> is_in_memory("/dev/shm/models", ()), is_in_memory("/tmp", ("/tmp",)), is_in_memory("/tmpfs", ("/tmp",))
    (True, True, False)
    """
    return any(PurePosixPath(folder).is_relative_to(one) for one in (_SHARED_MEMORY, *memory_folders))


def _engine_gib(plan: ServePlan, ranks: int) -> int:
    if plan.accelerator.kind == "cpu":  # the plan has divided the job's memory among sockets
        return _gib(ranks * plan.accelerator.total_bytes)
    return _GIB_BASE + _GIB_PER_GPU * ranks


def _images_gib(request: ServeRequest, api_servers: int) -> int:
    """Return what the caches of processed images take beyond vLLM's default: one of each API server and of the core."""
    each = request.engine_option("--mm-processor-cache-gb") or 0
    return max(0, math.ceil((each - _GIB_OF_IMAGES) * (api_servers + 1)))


def _weights_gib(plan: ServePlan) -> int:
    """Return what the files of the model take, which may have 16 bits for 8 in memory."""
    memory, ranks = plan.memory, plan.layout.num_gpus
    stored = 2 if plan.quantizes_files else 1
    return _gib((memory.weight_bytes + memory.offloaded_bytes) * ranks * stored) + _GIB_BESIDE_WEIGHTS


def _model_folder(request: ServeRequest) -> str | None:
    """Return the folder of the nodes in which the model's files are. None: random weights."""
    if request.load_format == "dummy":
        return None
    if request.model.startswith("/"):
        return request.model
    return request.engine_option("--download-dir") or request.hub_cache or str(hub_cache(request.env))


def _offloaded_cache_bytes(request: ServeRequest, ranks: int) -> int:
    """Return what all ranks of an engine keep of the cache in the memory of their nodes.

    Sources, of vLLM 0.32: `_post_init_kv_transfer_config` in config/vllm.py, v1/kv_offload/cpu/spec.py (its
    `world_size` is without data-parallel ranks) and simple_cpu_offload_connector.py. With the backend lmcache the
    memory is that of LMCache's own server.
    """
    size = request.engine_options.get("kv_offloading_size")
    if size is not None:
        return 0 if request.engine_option("--kv-offloading-backend") == "lmcache" else int(size * GIB)
    return sum(_connector_bytes(one, ranks) for one in _connectors(request.engine_options.get("kv_transfer_config")))


def _connectors(config: Any) -> Iterator[dict[str, Any]]:
    """Yield a connector with its `extra`, and those that MultiConnector joins."""
    if isinstance(config, dict):
        extra = config.get("kv_connector_extra_config")
        extra = extra if isinstance(extra, dict) else {}
        yield {"name": config.get("kv_connector"), "extra": extra}
        joined = extra.get("connectors")
        for one in joined if isinstance(joined, list) else ():
            yield from _connectors(one)


def _connector_bytes(connector: dict[str, Any], ranks: int) -> int:
    is_simple, extra = connector["name"] == "SimpleCPUOffloadConnector", connector["extra"]
    each = extra.get("cpu_bytes_to_use_per_rank") if is_simple else None
    total = extra.get("cpu_bytes_to_use", _SIMPLE_OFFLOAD_BYTES if is_simple else 0) if each is None else each * ranks
    return int(total) if isinstance(total, int | float) else 0


def _gib(size: float) -> int:
    return math.ceil(size / GIB)


def _listed(parts: Mapping[str, int], between: str) -> str:
    return between.join(f"{gib} for {name}" for name, gib in parts.items())
