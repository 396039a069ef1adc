"""Whether a node has what processes need: memory, shared memory, folders to write to, limits, commands, short paths."""

from __future__ import annotations

from hpc_serve.job.preflight.facts import LimitFacts, NodeFacts
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, failed, not_checked, ok, warning, worst
from hpc_serve.sizes import GIB, MIB

# A rank of vLLM takes 1 to 3 GiB of the node's memory beside its weights; one compiles with more.
_BYTES_PER_RANK = 2 * GIB
_ENOUGH_SHM_BYTES = GIB
_NO_SHM_BYTES = MIB
_ENOUGH_DISK_BYTES, _NO_DISK_BYTES = 2 * GIB, MIB
# Ray 2.60's head alone has 160 threads on a machine of two cores, and more on larger ones.
_ENOUGH_TASKS, _TOO_FEW_TASKS, _TOO_FEW_FOR_RAY = 2_048, 64, 160
_ENOUGH_FILES, _ENOUGH_PROCESSES = 4_096, 4_096
_ENOUGH_LOCKED_BYTES = 64 * MIB
# The kernel's limit of a UNIX socket's path, and what vLLM's names of sockets add to their folder.
_SOCKET_PATH, _SOCKET_NAME = 107, 37
_UNLIMITED = -1
# vLLM's queues between ranks, Ray's object store (job/run/ray_cluster.py), and what one model compiles to.
_SHARED_BYTES_PER_RANK, _OBJECT_STORE_BYTES, _CACHES_BYTES = GIB // 4, GIB, 2 * GIB
LOGS = "logs"
"""The purpose of the one folder without which an engine serves."""
STAGED = "the copy of the model"
"""That of the folder of --stage."""
CACHES = "caches"
"""That of the folder of what the engine compiles."""


def memory(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the memory that Slurm gave is there, and is enough for the engine's data."""
    if (seen := facts.memory) is None:
        return not_checked("the memory was not read")
    limit = min(seen.total_bytes, seen.limit_bytes or seen.total_bytes)
    whose = "the job's cgroup allows" if limit < seen.total_bytes else "the node has"
    offload = needs.offload_bytes * needs.ranks_per_node
    staged = needs.staged_bytes if STAGED in (kept_in_memory := _kept_in_memory(facts)) else 0
    if offload > limit:
        return failed(
            f"{whose} {limit / GIB:.1f} GiB, --cpu-offload-gb keeps {offload / GIB:.1f} GiB of the weights in it",
            "Ask for more memory (--mem), or offload less.",
        )
    if offload + staged > limit:
        return failed(
            f"{whose} {limit / GIB:.1f} GiB, and the copy of the model takes {staged / GIB:.1f} GiB of it, since its "
            "folder is memory",
            "Ask for more memory (--mem), or name a folder on a disk (HPC_SERVE_STAGE, `stage` in the site file).",
        )
    if needs.memory_bytes is not None and limit < needs.memory_bytes * 0.95:
        return warning(
            f"{whose} {limit / GIB:.1f} GiB, Slurm says that this job has {needs.memory_bytes / GIB:.1f}",
            "The kernel ends processes at the lower of the two: ask for less (--mem), or for another node.",
        )
    shared = _SHARED_BYTES_PER_RANK * needs.ranks_per_node + (_OBJECT_STORE_BYTES if needs.backend == "ray" else 0)
    kept = shared + staged + (_CACHES_BYTES if CACHES in kept_in_memory else 0)
    wanted = offload + _BYTES_PER_RANK * needs.ranks_per_node + kept
    if limit < wanted:
        return warning(
            f"{whose} {limit / GIB:.1f} GiB for {needs.ranks_per_node} ranks, about {wanted / GIB:.0f} are needed, "
            f"{kept / GIB:.0f} of them for files in memory (/dev/shm{_other_folders(facts)})",
            "Ask for more memory (--mem; what is in /dev/shm counts too).",
        )
    used = f", {seen.used_of_limit_bytes / GIB:.1f} of them used" if seen.used_of_limit_bytes is not None else ""
    return ok(f"{whose} {limit / GIB:.1f} GiB{used}")


def _kept_in_memory(facts: NodeFacts) -> frozenset[str]:
    """Return the purposes of folders that are memory."""
    return frozenset(one.purpose for one in facts.folders or () if one.is_in_memory)


def _other_folders(facts: NodeFacts) -> str:
    paths = [one.path for one in facts.folders or () if one.is_in_memory and not one.path.startswith("/dev/shm")]
    return "".join(f", {path}" for path in paths)


def shared_memory(facts: NodeFacts, needs: Needs) -> Seen:
    """/dev/shm is there, can be written to, and has room."""
    if (seen := facts.memory) is None:
        return not_checked("/dev/shm was not looked at")
    cure = (
        "In a container, bind the node's (apptainer: --bind /dev/shm) or give it a size; on the node, ask its "
        "administrators."
    )
    if not seen.shm_is_writable:
        return failed("/dev/shm is not there, or not writable", cure)
    if seen.shm_bytes and seen.shm_free_bytes < _NO_SHM_BYTES:
        return failed(
            f"/dev/shm has {seen.shm_free_bytes / MIB:.1f} of {seen.shm_bytes / MIB:.0f} MiB free",
            "Dead programs left files there (`ls -l /dev/shm`): remove yours, or exclude the node (--exclude).",
        )
    text = f"/dev/shm has {seen.shm_free_bytes / GIB:.1f} of {seen.shm_bytes / GIB:.1f} GiB free"
    needs_room = needs.ranks_per_node > 1 or needs.backend == "ray"
    if needs_room and seen.shm_free_bytes < _ENOUGH_SHM_BYTES:
        return warning(f"{text}, ranks of one node share memory there", cure)
    return ok(text)


def staged(facts: NodeFacts, needs: Needs) -> Seen:
    """There is room for the copy of the model that each node makes, and 1 GiB more."""
    if facts.folders is None:
        return not_checked("the folders were not looked at")
    if not needs.staged_bytes:
        return ok("the model is loaded from where it is, without --stage")
    seen = next((one for one in facts.folders if one.purpose == STAGED), None)
    size = needs.staged_bytes / GIB
    if seen is None:
        return ok(f"{size:.1f} GiB, which another run on this node has copied")
    text = f"{size:.1f} GiB of the model are copied to {seen.path}, which has {seen.free_bytes / GIB:.1f} GiB free"
    if not seen.is_writable or seen.free_bytes < needs.staged_bytes + GIB:
        return failed(text, "Set HPC_SERVE_STAGE (`stage` in the site file) to a larger folder, or leave --stage out.")
    return ok(text)


def folders(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the folders for caches, temporary files and logs are writable and have room."""
    if not facts.folders:
        return not_checked("the folders were not looked at")
    return worst(
        _folder(one.purpose, one.path, one.is_writable, one.free_bytes, one.free_files) for one in facts.folders
    )


def _folder(purpose: str, path: str, is_writable: bool, free_bytes: int, free_files: int | None) -> Seen:
    cure = "Free some, or name another folder (HPC_SERVE_TMPDIR, HPC_SERVE_CACHE_DIR, HPC_SERVE_LOG_DIR)."
    refused = warning if purpose == LOGS else failed  # an engine without logs serves
    if not is_writable:
        return refused(f"{path} ({purpose}) cannot be written to", f"{cure} A quota may be used up.")
    if free_bytes < _NO_DISK_BYTES or free_files == 0:
        files = " and no file" if free_files == 0 else ""
        return refused(f"{path} ({purpose}) has {free_bytes / MIB:.1f} MiB{files} free", cure)
    if free_bytes < _ENOUGH_DISK_BYTES and purpose != LOGS:
        return warning(f"{path} ({purpose}) has {free_bytes / GIB:.1f} GiB free; compiled kernels may take more", cure)
    return ok(f"{path} has {free_bytes / GIB:.1f} GiB free")


def limits(facts: NodeFacts, needs: Needs) -> Seen:
    """Limits on locked memory, open files, processes and the size of one, and on tasks of the job's cgroup."""
    if facts.limits is None:
        return not_checked("the limits were not read")
    return worst([_tasks(facts, needs), *(_limit(name, limit, facts, needs) for name, limit in facts.limits.items())])


def _tasks(facts: NodeFacts, needs: Needs) -> Seen:
    memory = facts.memory
    if memory is None or memory.tasks_limit is None:
        return ok("no limit on tasks")
    left = memory.tasks_limit - (memory.tasks or 0)
    text = f"the job's cgroup has room for {left} of {memory.tasks_limit} tasks (pids.max)"
    cure = "The site's limit is too low for an engine's threads: ask its administrators (TasksMax, pids.max)."
    if left < _too_few_tasks(needs):
        return failed(text, cure)
    return warning(text, cure) if left < _ENOUGH_TASKS else ok(text)


def _too_few_tasks(needs: Needs) -> int:
    return _TOO_FEW_FOR_RAY if needs.backend == "ray" else _TOO_FEW_TASKS


def _processes(limit: LimitFacts, text: str, needs: Needs) -> Seen:
    cure = (
        "Raise it in the shell that you submit from (`ulimit -u`): Slurm takes it over. Else ask your administrators."
    )
    if limit.used is not None and limit.soft - limit.used < _too_few_tasks(needs):
        return failed(f"{text}, and you have {limit.used:,} processes and threads there before the engine", cure)
    return warning(f"{text}, an engine's threads count too", cure) if limit.soft < _ENOUGH_PROCESSES else ok(text)


def _limit(name: str, limit: LimitFacts, facts: NodeFacts, needs: Needs) -> Seen:
    text = f"{name} is {_words(limit.soft)}" + ("" if limit.soft == limit.hard else f" (hard {_words(limit.hard)})")
    ask = "Ask the site's administrators (PropagateResourceLimits, limits.conf), or raise it before you submit"
    if name == "memlock" and 0 <= limit.hard < _ENOUGH_LOCKED_BYTES and _uses_infiniband(facts, needs):
        return warning(f"{text}, and NCCL over InfiniBand locks memory", f"{ask}: `ulimit -l unlimited`.")
    if name == "nofile" and 0 <= limit.hard < _ENOUGH_FILES:
        return warning(f"{text}, an engine under load opens thousands of files", f"{ask}: `ulimit -n 65536`.")
    if name == "nproc" and limit.soft >= 0:
        return _processes(limit, f"{text} (ulimit -u)", needs)
    if name == "as" and limit.soft != _UNLIMITED and needs.gpus:
        return warning(
            f"{text}, and CUDA reserves more address space than the node has memory", f"{ask}: `ulimit -v unlimited`."
        )
    return ok(text)


def _uses_infiniband(facts: NodeFacts, needs: Needs) -> bool:
    return needs.num_nodes > 1 and facts.network is not None and facts.network.active_ib_ports > 0


def _words(value: int) -> str:
    return "unlimited" if value == _UNLIMITED else f"{value:,}"


def commands(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the engine's command, and Ray's, are in the node's environment."""
    if (software := facts.software) is None:
        return not_checked("the environment was not read")
    if software.missing_commands:
        names = " and ".join(software.missing_commands)
        return failed(
            f"no command {names} in this environment",
            "Activate an environment that has it (HPC_SERVE_ENV, or venv, conda or apptainer in the site file).",
        )
    return ok(", ".join(f"{name} {version}" for name, version in software.versions.items()))


def paths(facts: NodeFacts, needs: Needs) -> Seen:
    """UNIX sockets below the folder for temporary files have paths that the kernel takes."""
    if facts.software is None or not facts.software.socket_folder:
        return not_checked("the folder of sockets is not known")
    folder = facts.software.socket_folder
    text = f"sockets in {folder} have {len(folder) + _SOCKET_NAME} characters, {_SOCKET_PATH} are allowed"
    if len(folder) + _SOCKET_NAME > _SOCKET_PATH:
        return failed(text, "Set HPC_SERVE_TMPDIR (and VLLM_RPC_BASE_PATH, if you set it) to a shorter folder.")
    return ok(text)
