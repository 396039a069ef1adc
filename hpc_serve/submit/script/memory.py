"""How much of a node's memory a job asks for, where it does not take whole nodes. Pure.

Slurm counts what a job writes to /dev/shm, and to any other folder that is memory (tmpfs), as memory of the job. What
is really there is looked at by the preflight.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hpc_serve.sizes import GIB
from hpc_serve.submit.request.request import ServeRequest

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan

# One rank with its threads, and what it shares with the others in /dev/shm; the API server, Ray and its object store.
_GIB_PER_GPU = 16
_GIB_BASE = 16
_GIB_OF_CACHES = 4
_SHARED_MEMORY, _TMP = "/dev/shm", "/tmp"
# Tokenizer and further files of a model, beside its weights.
_GIB_BESIDE_WEIGHTS = 1


def memory_gib(request: ServeRequest, plan: ServePlan, gpus: int) -> int:
    """GiB of each node for a job with `gpus` GPUs of it, all replicas together."""
    if plan.accelerator.kind == "cpu":  # the plan has divided the job's memory among sockets
        own = -(-gpus * plan.accelerator.total_bytes // GIB)
    else:
        own = _GIB_BASE + _GIB_PER_GPU * gpus
    settings = request.settings
    if is_in_memory(settings.cache_dir or settings.tmpdir or _TMP, request.memory_folders):
        own += _GIB_OF_CACHES
    staged = _staged_gib(request, plan)
    return staged + max(own, staged)  # a copy may take half of the memory (job/weights/staging.py)


def is_in_memory(folder: str, memory_folders: tuple[str, ...]) -> bool:
    """Whether a folder of the nodes is memory: /dev/shm, and those that the site names.

    >>> is_in_memory("/dev/shm/models", ()), is_in_memory("/tmp", ("/tmp",)), is_in_memory("/tmpfs", ("/tmp",))
    (True, True, False)
    """
    return any(PurePosixPath(folder).is_relative_to(one) for one in (_SHARED_MEMORY, *memory_folders))


def _staged_gib(request: ServeRequest, plan: ServePlan) -> int:
    """What the copy of the model takes; replicas on one node share it."""
    stage, settings = request.settings.stage, request.settings
    if stage is None or stage == "off":
        return 0
    folder = stage if stage.startswith("/") else settings.tmpdir or _TMP
    if not is_in_memory(folder, request.memory_folders):
        return 0
    layout = plan.layout
    weights = plan.memory.weight_bytes * layout.tensor_parallel_size * layout.pipeline_parallel_size
    return -(-weights // GIB) + _GIB_BESIDE_WEIGHTS
