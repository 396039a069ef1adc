"""A setting as `hpc-serve init` writes it, the text of the site file, and the settings that say where things are. Pure.

The file has each setting below its reason. Questions are comments that can be uncommented. The settings here are of
Python, containers, modules, networks, folders and the hub; `choose` makes those that follow from Slurm.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpc_serve.printable import json_text, printable
from hpc_serve.submit.init.facts import ClusterFacts, Mount

Value = str | int | bool | tuple[str, ...] | Mapping[str, str]
_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z/~][\w./@%+=-]*")
# Words that some readers of YAML take for something else than a text.
_NOT_TEXT = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """`value` is the decision; None if only a person can know it, and `example` shows what to write.

    `why` says what was seen and what follows from it, or asks the question that the setting answers.
    """

    key: str
    why: str
    value: Value | None = None
    example: Value = ""


def decided(key: str, value: Value, why: str) -> Setting:
    return Setting(key, why, value=value)


def question(key: str, example: Value, why: str) -> Setting:
    return Setting(key, why, example=example)


def site_text(settings: Iterable[Setting], *, head: str, above: Mapping[str, str] | None = None) -> str:
    """Return the whole file. `head` says who wrote it; `above` has the settings of a file that this one is merged with,
    by key, and where each stands: they are not written again.
    """
    parts = [_comment(head)]
    for setting in settings:
        where = (above or {}).get(setting.key)
        is_written = setting.value is not None and where is None
        value = setting.value if setting.value is not None else setting.example
        reason = f"{setting.why} It is set in {where}, which holds unless you set it here." if where else setting.why
        parts.append(f"{_comment(reason)}{'' if is_written else '# '}{setting.key}: {yaml_value(value)}\n")
    return "\n".join(parts)


def yaml_value(value: Value) -> str:
    """Return a value on one line, as YAML.

    >>> yaml_value("h100-80gb"), yaml_value("04:00:00"), yaml_value(("cuda/12.8", "a b")), yaml_value(True)
    ('h100-80gb', '"04:00:00"', '[cuda/12.8, "a b"]', 'true')
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {yaml_value(one)}" for name, one in value.items()) + "}"
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(value).lower()
    is_plain = _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value)
    return value if is_plain else json_text(value)


def _comment(text: str) -> str:
    lines = [line for part in text.split("\n") for line in textwrap.wrap(printable(part), _WIDTH - 2) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


# -- where things are

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


def places(facts: ClusterFacts) -> Iterator[Setting]:
    """Yield the settings in the order of writing."""
    tmp = _mount(facts, "/tmp")
    is_memory = tmp is not None and tmp.kind == "tmpfs"
    yield _python(facts)
    yield from _containers(facts)
    yield _modules(facts)
    yield _interface(facts)
    yield _tmpdir(facts, is_memory=is_memory)
    why = "Does a folder on the node outlive jobs? Compile caches in it make later starts faster."
    yield question("cache_dir", "/local/cache", why)
    if is_memory:
        why = "/tmp of this host is memory. If that of the nodes is not, remove this: jobs ask for more memory by it."
        yield decided("memory_folders", ("/tmp",), why)
    else:
        why = "Are further folders of a node memory (tmpfs)? Jobs pay for what they keep there, and ask for more."
        yield question("memory_folders", ("/tmp",), why)
    yield _log_dir(facts)
    yield _hub(facts)
    why = "What shall `submit` say where weights are missing?"
    yield question("weights_help", "ask support for /project/models", why)
    yield _env(facts)


def _python(facts: ClusterFacts) -> Setting:
    if facts.environment and facts.engine:
        home = _mount(facts, facts.environment)
        seen = f" It is on {home.kind}: do the nodes see it?" if home is not None and not home.is_shared else ""
        why = f"HPC_SERVE_ENV, or the environment that `init` ran in; it has vLLM {facts.engine}.{seen}"
        return decided("venv", facts.environment, why)
    this = f"This one ({facts.environment}) has no vLLM" if facts.environment else "This one is none"
    return question(
        "venv",
        "/project/me/hpc-serve",
        "Which virtual environment has hpc-serve and vLLM, on a file system that the nodes see? "
        f"{this}. conda: NAME in its place works too.",
    )


def _containers(facts: ClusterFacts) -> Iterator[Setting]:
    for key, image in [_IMAGES[name] for name in facts.runtimes if name in _IMAGES][:1]:
        seen = ", ".join(facts.runtimes)
        yield question(key, image, f"An image in place of venv? Here is {seen}. It needs hpc-serve and vLLM in it.")
        yield question("binds", ("/scratch",), "Which folders must the image see beside your home?")


def _modules(facts: ClusterFacts) -> Setting:
    fitting = [name for name in facts.modules if _MODULES.fullmatch(name)]
    more = " …" if len(fitting) > _SHOWN else ""
    seen = f" Here are {', '.join(fitting[-_SHOWN:])}{more}." if fitting else ""
    reason = facts.unanswered.get("module")
    unread = f" ({reason})" if reason and not facts.modules else ""
    why = f"Which modules must be loaded first{unread}? vLLM's wheel brings CUDA with it; a driver is enough.{seen}"
    return question("modules", (fitting[-1],) if fitting else ("cuda/12.8",), why)


def _interface(facts: ClusterFacts) -> Setting:
    fast = [name for name in facts.interfaces if _FAST.fullmatch(name)]
    example = next(iter((*fast, *facts.interfaces)), "ib0")
    shown = ", ".join(f"{name} ({one[0]})" for name, one in facts.interfaces.items())
    seen = f" This host has {shown}." if shown else ""
    why = f"Over which interface do nodes talk? Their host names' interface, unless you say.{seen}"
    return question("interface", example, why)


def _tmpdir(facts: ClusterFacts, *, is_memory: bool) -> Setting:
    named = [f"${name}" for name in _LOCAL if facts.environ.get(name)]
    slurm = facts.config.get("TmpFS", "/tmp")
    is_other = slurm not in ("/tmp", "(null)")
    also = " Here that is in memory, which the job pays for." if is_memory else ""
    also += f" Slurm's TmpFS is {slurm}." if is_other else ""
    also += f" Set here: {', '.join(named)}." if named else ""
    why = f"Which folder of a node is for a job's private files? /tmp unless you say.{also}"
    return question("tmpdir", slurm if is_other else "/local", why)


def _log_dir(facts: ClusterFacts) -> Setting:
    mount = _mount(facts, facts.environ.get("HOME", "~"))
    why = "Shall logs go elsewhere than to the service's own folder, below ~/.hpc-serve?"
    if mount is not None and not mount.is_shared:
        why += (
            f" Your home is on {mount.kind}: if the nodes do not see it, set HPC_SERVE_HOME to a folder that they see."
        )
    return question("log_dir", "~/logs", why)


def _hub(facts: ClusterFacts) -> Setting:
    names = [name for name in ("https_proxy", "HTTPS_PROXY", "http_proxy") if facts.environ.get(name)]
    proxy = f" A proxy is set here ({', '.join(names)}); jobs take it over with the environment." if names else ""
    why = "Can nodes reach huggingface.co? If not, write true: then `submit` wants the weights to be here."
    return question("offline_nodes", True, f"{why}{proxy}")


def _env(facts: ClusterFacts) -> Setting:
    scratch = next((f"${name}" for name in _SCRATCH if facts.environ.get(name)), "/scratch/$USER")
    why = f"Which variables does every job need? `--env NAME=VALUE` is for one service.{_home_is_small(facts)}"
    return question("env", {"HF_HOME": f"{scratch}/huggingface"}, why)


def _home_is_small(facts: ClusterFacts) -> str:
    """Return a remark on where models go, if the home's quota or its free space is less than one of them needs."""
    if facts.environ.get("HF_HOME"):
        return ""
    home = _mount(facts, facts.environ.get("HOME", "~"))
    if home is None:
        return ""
    room_kib = min(home.free_kib, facts.quotas.get(home.source, home.free_kib))
    if room_kib >= _LEAST_FOR_MODELS_KIB:
        return ""
    free = max(0, room_kib) / _GIB_KIB
    return f" Models go to ~/.cache/huggingface, where {free:,.0f} GiB are left: set HF_HOME."


def _mount(facts: ClusterFacts, folder: str) -> Mount | None:
    """Return the file system of a folder; of one that df was not asked for, that of the nearest above it."""
    exact = next((one for one in facts.mounts if one.folder == folder), None)
    above = [one for one in facts.mounts if folder.startswith(one.mounted_on.rstrip("/") + "/")]
    return exact or max(above, key=lambda one: len(one.mounted_on), default=None)
