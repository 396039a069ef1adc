"""The options of a request, each declared once: of sbatch, of Python's place, of the job's program, and `env`. Pure.

`option` declares a field, its command-line option, and its words in a script. cli/submit/request.py has Click's side.
Values are checked here as far as that is possible without a cluster; Slurm decides whether a partition exists. `env`
are variables that a site, a model or a service wants in its jobs. They stand in the script as they are, so a secret is
refused by its name or form. `$NAME` in a site file is expanded with the variables of the user who submits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import LONGEST_THAT_FITS
from hpc_serve.units import format_size

Kind = Literal["", "size", "tokens", "time", "replicas", "positive", "share", "least_one"]
"""How a value is written; "" by its type alone."""


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any = None,
    unset: Any = MISSING,
    kind: Kind = "",
    spelled: tuple[str, ...] = (),
    least: int | None = None,
    of_plan: bool = False,
    group: str = "",
) -> Any:
    """Declare a field that is an option of `submit` and `render`, and of `plan` if `of_plan`.

    `unset` is the command's value for an option left out, if it is not the field's default. A number is at least
    `least`. `group` tells where the `#SBATCH` line of an option of sbatch stands; script/render.py writes the line of
    one without a group.
    """
    about = {"help": help, "metavar": metavar, "kind": kind, "spelled": spelled, "least": least, "of_plan": of_plan}
    return field(default=default, metadata={**about, "unset": unset, "group": group})


def spellings(one: Field[Any]) -> tuple[str, ...]:
    """Return the option's spellings: its own, else the field's name with hyphens."""
    return one.metadata.get("spelled") or (f"--{one.name.replace('_', '-')}",)


def unset_value(one: Field[Any]) -> Any:
    """Return the value of an option that is left out."""
    unset = one.metadata["unset"] if one.metadata["unset"] is not MISSING else one.default
    return None if unset is MISSING else unset


def option_words(one: Field[Any], value: Any) -> list[str]:
    """Return the words of a command line that give this value; none for an option left out."""
    if value is None or value == unset_value(one):
        return []
    name = spellings(one)[0]
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, _TEXTS.get(one.metadata["kind"], str)(value)]


def check_least(request: Any) -> None:
    """Raise InvalidRequestError for an option of a request that is below its `least`."""
    for one in fields(request):
        value, least = getattr(request, one.name), one.metadata.get("least")
        is_auto = (one.name, value) == ("max_model_len", LONGEST_THAT_FITS)
        if value is not None and least is not None and value < least and not is_auto:
            name = spellings(one)[0].removeprefix("--")
            raise InvalidRequestError(f"{name} is {value:g}: it must be at least {least}.")


_TEXTS: Mapping[str, Any] = {
    "size": format_size,
    "time": lambda seconds: f"{seconds:.15g}s",
    "tokens": lambda tokens: "auto" if tokens == LONGEST_THAT_FITS else str(tokens),
}

# -- the variables of a job

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})")
_OF_SUBMISSION = frozenset({"HPC_SERVE_HOME", "HPC_SERVE_ENV", "HPC_SERVE_SITE", "HPC_SERVE_LOG_DIR"})
_OF_SLURM = ("SLURM_", "SBATCH_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_env(env: Mapping[str, str]) -> None:
    """Raises InvalidRequestError for what cannot stand in a script, or must not; values are not quoted in it."""
    if not env:
        return
    from hpc_serve.redact import is_secret  # compiles many patterns

    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"env: {name!r} is no name of a variable; write NAME=VALUE.")
        if is_secret(name, value):
            raise InvalidRequestError(
                f"env: {name} looks like a secret, and would stand in the script for whoever reads it. "
                "`hf auth login` keeps a hub's token in a private file, which jobs read. Export any other before "
                "`hpc-serve submit`: sbatch hands your environment to the job, and no file of ours has it."
            )
        if name in _OF_SUBMISSION:
            raise InvalidRequestError(
                f"env: {name} must hold where you submit as well: export it in your shell, or in a module file."
            )
        if name.startswith(_OF_SLURM):
            raise InvalidRequestError(f"env: {name} is Slurm's to set in a job; leave it out.")
        if not all(character.isprintable() for character in value):
            raise InvalidRequestError(f"env: the value of {name} must be one line of text.")


def parse_env(words: Iterable[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE` words; the last of a name counts. Raises InvalidRequestError.

    >>> parse_env(["HF_HOME=/dev/shm/hf", "NCCL_DEBUG=INFO"])
    {'HF_HOME': '/dev/shm/hf', 'NCCL_DEBUG': 'INFO'}
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidRequestError(f"--env {name}: write it as --env NAME=VALUE.")
        found[name] = value
    return found


def expanded(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """`env` with `$NAME` and `${NAME}` replaced by what `environ` has, and `$$` by `$`. Raises InvalidRequestError.

    >>> expanded({"HF_HOME": "$SCRATCH/hf", "PRICE": "$$5"}, {"SCRATCH": "/scratch/alice"})
    {'HF_HOME': '/scratch/alice/hf', 'PRICE': '$5'}
    """

    def value_of(name: str, found: re.Match[str]) -> str:
        variable = found[2] or found[3]
        if found[1]:
            return "$"
        if variable not in environ:
            raise InvalidRequestError(
                f"env: {name} uses ${variable}, which is not set here. Set it, or write $$ for a $ that shall stay."
            )
        return environ[variable]

    return {name: _VARIABLE.sub(lambda found, name=name: value_of(name, found), text) for name, text in env.items()}  # type: ignore[misc]


# -- sbatch

GpuDirective = Literal["gpus-per-node", "gres"]
_TIME = re.compile(r"\d{1,9}(:\d{1,2}){0,2}|\d{1,6}-\d{1,2}(:\d{1,2}){0,2}")
_NOTICE = re.compile(r"B:USR1@(\d{1,5})")
_LEAST_NOTICE_S = 30
_SECONDS_OF = (3600, 60, 1)
_PRINTABLE_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;<>{}!?#]+")  # Slurm's own notation uses & | * ( ) [ ]


def check_directive(name: str, value: str) -> str:
    """Return `value` if it can stand unchanged in an `#SBATCH --name=value` line.

    Slurm reads these lines without a shell, so nothing can be quoted in them. A newline would begin another line, and
    versions of Slurm differ in how they read blanks and quotes. Raises InvalidRequestError.
    """
    if not (value.isprintable() and _PRINTABLE_WORD.fullmatch(value)):
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be one word without blanks, quotes, newlines "
            r"or any of \ ` $ ; < > { } ! ? #."
        )
    return value


_sbatch = partial(option, unset=None)


@dataclass(frozen=True, kw_only=True)
class SbatchOptions:
    """sbatch's own options under sbatch's own names, with underscores; the one list of them.

    The site file may set each, and each is an option of `submit` and `render`. None leaves a line out, so that the
    cluster's own default holds. `time` is a Slurm time ("12:00:00", "2-00:00:00", minutes). `mem` is per node in
    Slurm's notation ("80G", "0" = all of the node). `gpu_directive` chooses between `--gpus-per-node=8` and
    `--gres=gpu:8`; `gres_type` adds the site's name of the GPU.
    """

    partition: str | None = _sbatch("Slurm partition.", "NAME", group="where")
    account: str | None = _sbatch("Slurm account.", "NAME", group="where")
    qos: str | None = _sbatch("Slurm QOS.", "NAME", group="where")
    constraint: str | None = _sbatch("Features the nodes must have.", "FEATURES", group="where")
    reservation: str | None = _sbatch("Slurm reservation.", "NAME", group="where")
    nodelist: str | None = _sbatch("Nodes that must be used.", "NODES", group="where")
    exclude: str | None = _sbatch("Nodes that must not be used.", "NODES", group="where")
    cpus_per_task: int | None = _sbatch("CPU cores of each node.", "N", least=1, group="share")
    mem: str | None = _sbatch("Memory of each node, as Slurm writes it (200G; 0 is all).", "SIZE", group="share")
    time: str | None = _sbatch(
        "Time limit: minutes, HH:MM:SS or D-HH:MM:SS [default: 12:00:00].", "TIME", default="12:00:00", group="share"
    )
    signal: str | None = _sbatch(
        "How long before the time limit the service drains [default: B:USR1@120].",
        "B:USR1@S",
        default="B:USR1@120",
        group="share",
    )
    exclusive: bool | None = _sbatch("Whole nodes [default: if several, or of TPUs or CPUs].")
    requeue: bool | None = _sbatch(
        "Slurm may run the job again, also after an engine that fails for good [default: as the site has it]."
    )
    gpu_directive: GpuDirective = field(
        default="gpus-per-node", metadata={"site_help": "How Slurm is asked for GPUs here: `gpus-per-node` or `gres`."}
    )
    gres_type: str | None = field(default=None, metadata={"site_help": "The site's own name of the GPU, as `h100`."})


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(SbatchOptions):
    """The options of one job. `extra` holds further `--name=value` words, one `#SBATCH` line each."""

    job_name: str | None = _sbatch("Name in the queue [default: hpc-serve-NAME].", "NAME")
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, str) and one.name != "time":
                check_directive(one.name.replace("_", "-"), value)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InvalidRequestError(f"time is {self.time!r}: use minutes, HH:MM:SS or D-HH:MM:SS.")
        if self.signal is not None and (self.notice_s or 0) < _LEAST_NOTICE_S:
            raise InvalidRequestError(
                f"signal is {self.signal!r}: write B:USR1@SECONDS, at least {_LEAST_NOTICE_S}: "
                "the script waits for this signal."
            )
        check_least(self)
        check_choice("gpu_directive", self.gpu_directive, GpuDirective)
        for word in self.extra:
            _check_extra(word)

    @property
    def notice_s(self) -> int | None:
        """Return the seconds before the time limit at which Slurm tells the script; None if Slurm does not."""
        found = _NOTICE.fullmatch(self.signal or "")
        return int(found[1]) if found else None

    @property
    def time_limit_s(self) -> float | None:
        """Return the time limit in seconds; None if it is the cluster's own.

        >>> SlurmOptions(time="1-12:00").time_limit_s, SlurmOptions(time="90").time_limit_s
        (129600.0, 5400.0)
        """
        if self.time is None:
            return None
        days, _, rest = self.time.rpartition("-")
        numbers = [int(number) for number in rest.split(":")]
        # After days the first number is hours; if there are no days, one or two numbers begin with minutes.
        units = _SECONDS_OF if days or len(numbers) == 3 else _SECONDS_OF[1:]
        return float(int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False)))

    def gpu_line(self, count: int) -> str:
        """Return the line that asks sbatch for GPUs. Hosts of TPUs, and sockets, are whole nodes and need no such
        line."""
        gpus = f"{self.gres_type}:{count}" if self.gres_type else f"{count}"
        return f"--gres=gpu:{gpus}" if self.gpu_directive == "gres" else f"--{self.gpu_directive}={gpus}"

    def option_words(self) -> list[str]:
        """The options of `render` that give these again; the site's `gpu_directive` and `gres_type` have none."""
        options = (one for one in fields(self) if "help" in one.metadata)
        words = [word for one in options for word in option_words(one, getattr(self, one.name))]
        return [*(f"--sbatch={word}" for word in self.extra), *words]

    def lines(self, group: str) -> list[str]:
        """`--name=value` of the options of one group that are set, in order."""
        options = (one for one in fields(self) if one.metadata.get("group") == group)
        values = {one.name: getattr(self, one.name) for one in options}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _check_extra(word: str) -> None:
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z-]*(=.+)?", word, re.DOTALL):
        raise InvalidRequestError(f"extra sbatch option {word!r}: write it as --name=value or --name.")
    check_directive("extra sbatch option", word)
    if word.startswith(("--output", "-o")):
        raise InvalidRequestError(
            f"extra sbatch option {word!r}: `hpc-serve logs` would not find that file. Use --log-dir FOLDER."
        )


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises InvalidRequestError for a value that is none of the choices."""
    known = get_args(choices)
    if value not in known:
        *most, last = known
        raise InvalidRequestError(f"{name} is {value!r}: use {', '.join(most)} or {last}.")


# -- Python and the program in the job

EnvironmentKind = Literal["auto", "venv", "conda", "none", "apptainer", "pyxis", "podman-hpc", "charliecloud"]
CONTAINERS: tuple[EnvironmentKind, ...] = ("apptainer", "pyxis", "podman-hpc", "charliecloud")
"""The kinds that are an image."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How a script gets a Python with hpc-serve and the engine in it.

    `auto`: `$HPC_SERVE_ENV`, else `.venv` in the folder of submission; `venv`: the folder `path`; `conda`: the
    environment `path` (name or folder); one of CONTAINERS: the image `path` under that runtime, which sees `binds` and
    takes further `container_options`; `none`: what modules put on PATH. `modules` are loaded first, whatever the kind.
    """

    kind: EnvironmentKind = "auto"
    path: str | None = None
    modules: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    container_options: tuple[str, ...] = ()

    @property
    def is_container(self) -> bool:
        return self.kind in CONTAINERS

    def __post_init__(self) -> None:
        check_choice("environment kind", self.kind, EnvironmentKind)
        if self.kind not in ("auto", "none") and not self.path:
            raise InvalidRequestError(f"environment kind {self.kind} needs a path (or, for conda, a name).")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings that the in-job program finds in its environment; None leaves its default.

    `interface` is the network interface between nodes, `tmpdir` the node-local root of private folders, `cache_dir` a
    node-local folder for compile caches that outlive the job; they may take `cache_size`. `stage`: the engine loads a
    copy of the model on its node, below `tmpdir` ("on") or in the folder that it names.
    """

    interface: str | None = None
    tmpdir: str | None = None
    cache_dir: str | None = None
    cache_size: str | None = None
    stage: str | None = None

    def exports(self) -> dict[str, str]:
        """Environment variables to set in the script, by name."""
        named = {variable_of(setting.name): getattr(self, setting.name) for setting in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def variable_of(setting: str) -> str:
    """Return the environment variable of one of the JobSettings.

    >>> variable_of("tmpdir")
    'HPC_SERVE_TMPDIR'
    """
    return f"HPC_SERVE_{setting.upper()}"
