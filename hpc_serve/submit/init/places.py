"""Settings of a site file that say where things are: Python, containers, modules, networks, folders, the hub. Pure."""

from __future__ import annotations

import re

from hpc_serve.submit.init.facts import ClusterFacts, Interface, Mount
from hpc_serve.submit.init.setting import Setting

_FAST = re.compile(r"ib\d.*|ib\w*|hsn\d+|opa\d+|bond\d+|roce\d*|mlx\w*")
_MODULES = re.compile(
    r"(?:cuda|cudnn|rocm|apptainer|singularity\w*|charliecloud|enroot|podman\w*|proxy)(?:/.*|$)", re.I
)
_SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "WORKDIR", "PROJECT", "CSCRATCH", "SCRATCHDIR")
_LOCAL = ("TMPDIR", "LOCAL_SCRATCH", "SLURM_TMPDIR", "JOB_TMPDIR", "LOCALSCRATCH")
_IMAGES = {
    "apptainer": ("apptainer", "/project/me/vllm.sif"),
    "enroot": ("pyxis", "/project/me/vllm.sqsh"),
    "podman-hpc": ("podman_hpc", "vllm:latest"),
    "ch-run": ("charliecloud", "/project/me/vllm"),
}
"""The setting of each runtime's command, and how an image may look."""
_GIB_KIB = 1 << 20
_LEAST_FOR_MODELS_KIB = 200 * _GIB_KIB
_SHOWN = 8


def places(facts: ClusterFacts) -> tuple[Setting, ...]:
    """Return the settings in the order of writing."""
    return (
        _python(facts),
        *_containers(facts),
        _modules(facts),
        _interface(facts),
        *_local_folders(facts),
        _log_dir(facts),
        *_hub(facts),
        _env(facts),
    )


def _python(facts: ClusterFacts) -> Setting:
    if facts.environment and facts.engine:
        home = _mount(facts, facts.environment)
        is_local = home is not None and not home.is_shared
        seen = f" It is on {home.kind}: do the nodes see it?" if home is not None and is_local else ""
        return Setting(
            key="venv",
            value=facts.environment,
            why=f"HPC_SERVE_ENV, or the environment that `init` ran in; it has vLLM {facts.engine}.{seen}",
        )
    why = "Which virtual environment has hpc-serve and vLLM, on a file system that the nodes see? This one "
    why += f"({facts.environment}) has no vLLM." if facts.environment else "is none."
    return Setting(key="venv", example="/project/me/hpc-serve", why=f"{why} conda: NAME in its place works too.")


def _containers(facts: ClusterFacts) -> list[Setting]:
    if not facts.runtimes:
        return []
    key, image = next((_IMAGES[name] for name in facts.runtimes if name in _IMAGES), ("", ""))
    if not key:
        return []
    why = f"An image in place of venv? Here is {', '.join(facts.runtimes)}. It needs hpc-serve and vLLM in it."
    return [
        Setting(key=key, example=image, why=why),
        Setting(key="binds", example=("/scratch",), why="Which folders must the image see beside your home?"),
    ]


def _modules(facts: ClusterFacts) -> Setting:
    fitting = [name for name in facts.modules if _MODULES.fullmatch(name)]
    more = " …" if len(fitting) > _SHOWN else ""
    seen = f" Here are {', '.join(fitting[-_SHOWN:])}{more}." if fitting else ""
    reason = facts.unanswered.get("module")
    unread = f" ({reason})" if reason and not facts.modules else ""
    return Setting(
        key="modules",
        example=(fitting[-1],) if fitting else ("cuda/12.8",),
        why=f"Which modules must be loaded first{unread}? vLLM's wheel brings CUDA with it; a driver is enough.{seen}",
    )


def _interface(facts: ClusterFacts) -> Setting:
    fast = [one for one in facts.interfaces if _FAST.fullmatch(one.name) and one.addresses]
    example = (fast or list(facts.interfaces) or [Interface(name="ib0")])[0].name
    shown = ", ".join(f"{one.name} ({one.addresses[0]})" if one.addresses else one.name for one in facts.interfaces)
    seen = f" This host has {shown}." if shown else ""
    why = f"Over which interface do nodes talk? Their host names' interface, unless you say.{seen}"
    return Setting(key="interface", example=example, why=why)


def _local_folders(facts: ClusterFacts) -> list[Setting]:
    named = [f"${name}" for name in _LOCAL if facts.environ.get(name)]
    slurm = facts.config.get("TmpFS", "/tmp")
    tmp = _mount(facts, "/tmp")
    also = " Here that is in memory, which the job pays for." if tmp and tmp.kind == "tmpfs" else ""
    also += f" Slurm's TmpFS is {slurm}." if slurm not in ("/tmp", "(null)") else ""
    also += f" Set here: {', '.join(named)}." if named else ""
    return [
        Setting(
            key="tmpdir",
            example=slurm if slurm not in ("/tmp", "(null)") else "/local",
            why=f"Which folder of a node is for a job's private files? /tmp unless you say.{also}",
        ),
        Setting(
            key="cache_dir",
            example="/local/cache",
            why="Does a folder on the node outlive jobs? Compile caches in it make later starts faster.",
        ),
        _memory_folders(tmp),
    ]


def _memory_folders(tmp: Mount | None) -> Setting:
    if tmp is not None and tmp.kind == "tmpfs":
        why = "/tmp of this host is memory. If that of the nodes is not, remove this: jobs ask for more memory by it."
        return Setting(key="memory_folders", value=("/tmp",), why=why)
    why = "Are further folders of a node memory (tmpfs)? Jobs pay for what they keep there, and ask for more."
    return Setting(key="memory_folders", example=("/tmp",), why=why)


def _log_dir(facts: ClusterFacts) -> Setting:
    home = facts.environ.get("HOME", "~")
    mount = _mount(facts, home)
    question = "Shall logs go elsewhere than to the service's own folder, below ~/.hpc-serve?"
    if mount is not None and not mount.is_shared:
        question += (
            f" Your home is on {mount.kind}: if the nodes do not see it, set HPC_SERVE_HOME to a folder that they see."
        )
    return Setting(key="log_dir", example="~/logs", why=question)


def _hub(facts: ClusterFacts) -> list[Setting]:
    return [
        Setting(
            key="offline_nodes",
            example=True,
            why="Can nodes reach huggingface.co? If not, write true: then `submit` wants the weights to be here."
            + _proxies(facts),
        ),
        Setting(
            key="weights_help",
            example="ask support for /project/models",
            why="What shall `submit` say where weights are missing?",
        ),
    ]


def _proxies(facts: ClusterFacts) -> str:
    names = [name for name in ("https_proxy", "HTTPS_PROXY", "http_proxy") if facts.environ.get(name)]
    return f" A proxy is set here ({', '.join(names)}); jobs take it over with the environment." if names else ""


def _env(facts: ClusterFacts) -> Setting:
    scratch = next((f"${name}" for name in _SCRATCH if facts.environ.get(name)), "/scratch/$USER")
    why = f"Which variables does every job need? `--env NAME=VALUE` is for one service.{_home_is_small(facts)}"
    return Setting(key="env", example={"HF_HOME": f"{scratch}/huggingface"}, why=why)


def _home_is_small(facts: ClusterFacts) -> str:
    """Return a remark on where models go, if the home's quota or its free space is less than one of them needs."""
    if facts.environ.get("HF_HOME"):
        return ""
    home = _mount(facts, facts.environ.get("HOME", "~"))
    quota = next((one for one in facts.quotas if home and one.file_system == home.source), None)
    room = [home.free_kib] if home else []
    room += [quota.limit_kib - quota.used_kib] if quota and quota.limit_kib else []
    if not room or min(room) >= _LEAST_FOR_MODELS_KIB:
        return ""
    free = max(0, min(room)) / _GIB_KIB
    return f" Models go to ~/.cache/huggingface, where {free:,.0f} GiB are left: set HF_HOME."


def _mount(facts: ClusterFacts, folder: str) -> Mount | None:
    """Return the file system of a folder; of one that df was not asked for, that of the nearest above it."""
    exact = next((one for one in facts.mounts if one.folder == folder), None)
    above = [one for one in facts.mounts if folder.startswith(one.mounted_on.rstrip("/") + "/")]
    return exact or max(above, key=lambda one: len(one.mounted_on), default=None)
