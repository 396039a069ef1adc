"""sbatch's options, as a person may set them for a job or a site for all of them, checked. Pure.

Whether the partition exists is decided by Slurm.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

from hpc_serve.errors import InvalidRequestError

GpuDirective = Literal["gpus-per-node", "gres"]

_TIME = re.compile(r"\d{1,9}(:\d{1,2}){0,2}|\d{1,6}-\d{1,2}(:\d{1,2}){0,2}")
_NOTICE = re.compile(r"B:USR1@(\d{1,5})")
_LEAST_NOTICE_S = 30
_SECONDS_OF = (3600, 60, 1)
_PRINTABLE_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;<>{}!?#]+")  # Slurm's own notation uses & | * ( ) [ ]


def check_directive(name: str, value: str) -> str:
    """Return `value` if it can stand in an `#SBATCH --name=value` line as it is.

    Slurm reads these lines without a shell, so nothing can be quoted in them. A newline would begin another line, and
    versions of Slurm differ in how they read blanks and quotes. Raises InvalidRequestError.
    """
    if not (value.isprintable() and _PRINTABLE_WORD.fullmatch(value)):
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be one word without blanks, quotes, newlines "
            r"or any of \ ` $ ; < > { } ! ? #."
        )
    return value


def _sbatch(metavar: str, help: str, *, group: str = "") -> dict[str, str]:
    """What a command's help says of an option. `group` tells where its `#SBATCH` line stands (render.py)."""
    return {"metavar": metavar, "help": help, "group": group}


@dataclass(frozen=True, kw_only=True)
class SbatchOptions:
    """sbatch's own options under sbatch's own names, with underscores; the one list of them.

    The site file may set each, and each is an option of `submit` and `render`. None leaves a line out, so that the
    cluster's own default holds. `time` is a Slurm time ("12:00:00", "2-00:00:00", minutes). `mem` is per node in
    Slurm's notation ("80G", "0" = all of the node). `gpu_directive` chooses between `--gpus-per-node=8` and
    `--gres=gpu:8`; `gres_type` adds the site's name of the GPU.
    """

    partition: str | None = field(default=None, metadata=_sbatch("NAME", "Slurm partition.", group="where"))
    account: str | None = field(default=None, metadata=_sbatch("NAME", "Slurm account.", group="where"))
    qos: str | None = field(default=None, metadata=_sbatch("NAME", "Slurm QOS.", group="where"))
    constraint: str | None = field(
        default=None, metadata=_sbatch("FEATURES", "Features the nodes must have.", group="where")
    )
    reservation: str | None = field(default=None, metadata=_sbatch("NAME", "Slurm reservation.", group="where"))
    nodelist: str | None = field(default=None, metadata=_sbatch("NODES", "Nodes that must be used.", group="where"))
    exclude: str | None = field(default=None, metadata=_sbatch("NODES", "Nodes that must not be used.", group="where"))
    cpus_per_task: int | None = field(default=None, metadata=_sbatch("N", "CPU cores of each node.", group="share"))
    mem: str | None = field(
        default=None,
        metadata=_sbatch("SIZE", "Memory of each node, as Slurm writes it (200G; 0 is all).", group="share"),
    )
    time: str | None = field(
        default="12:00:00",
        metadata=_sbatch("TIME", "Time limit: minutes, HH:MM:SS or D-HH:MM:SS [default: 12:00:00].", group="share"),
    )
    signal: str | None = field(
        default="B:USR1@120",
        metadata=_sbatch(
            "B:USR1@S", "How long before the time limit the service drains [default: B:USR1@120].", group="share"
        ),
    )
    exclusive: bool | None = field(
        default=None, metadata=_sbatch("", "Whole nodes [default: if several, or of TPUs or CPUs].")
    )
    requeue: bool | None = field(
        default=None,
        metadata=_sbatch(
            "",
            "Slurm may run the job again, also after an engine that fails for good [default: as the site has it].",
        ),
    )
    gpu_directive: GpuDirective = field(
        default="gpus-per-node", metadata={"site_help": "How Slurm is asked for GPUs here: `gpus-per-node` or `gres`."}
    )
    gres_type: str | None = field(default=None, metadata={"site_help": "The site's own name of the GPU, as `h100`."})


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(SbatchOptions):
    """The options of one job. `extra` holds further `--name=value` words, one `#SBATCH` line each."""

    job_name: str | None = field(default=None, metadata=_sbatch("NAME", "Name in the queue [default: hpc-serve-NAME]."))
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, str) and option.name != "time":
                check_directive(option.name.replace("_", "-"), value)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InvalidRequestError(f"time is {self.time!r}: use minutes, HH:MM:SS or D-HH:MM:SS.")
        if self.signal is not None and (self.notice_s or 0) < _LEAST_NOTICE_S:
            raise InvalidRequestError(
                f"signal is {self.signal!r}: write B:USR1@SECONDS, at least {_LEAST_NOTICE_S}: "
                "the script waits for that one."
            )
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise InvalidRequestError(f"cpus-per-task is {self.cpus_per_task}: it must be at least 1.")
        check_choice("gpu_directive", self.gpu_directive, GpuDirective)
        for word in self.extra:
            _check_extra(word)

    @property
    def notice_s(self) -> int | None:
        """How many seconds before the time limit Slurm tells the script; None if it does not."""
        found = _NOTICE.fullmatch(self.signal or "")
        return int(found[1]) if found else None

    @property
    def time_limit_s(self) -> float | None:
        """The time limit in seconds; None if it is the cluster's own.

        >>> SlurmOptions(time="1-12:00").time_limit_s, SlurmOptions(time="90").time_limit_s
        (129600.0, 5400.0)
        """
        if self.time is None:
            return None
        days, _, rest = self.time.rpartition("-")
        numbers = [int(number) for number in rest.split(":")]
        # With days the first number is hours; without, one or two numbers begin with minutes.
        units = _SECONDS_OF if days or len(numbers) == 3 else _SECONDS_OF[1:]
        return float(int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False)))

    def gpu_line(self, count: int) -> str:
        """How sbatch is asked for GPUs. Hosts of TPUs, and sockets, are whole nodes to Slurm and need no such line."""
        gpus = f"{self.gres_type}:{count}" if self.gres_type else f"{count}"
        return f"--gres=gpu:{gpus}" if self.gpu_directive == "gres" else f"--{self.gpu_directive}={gpus}"

    def option_words(self) -> list[str]:
        """The options of `render` that give these again; the site's `gpu_directive` and `gres_type` have none."""
        words = [f"--sbatch={word}" for word in self.extra]
        for option in fields(self):
            value, name = getattr(self, option.name), option.name.replace("_", "-")
            if "help" in option.metadata and value is not None:
                switch = {True: f"--{name}", False: f"--no-{name}"}
                words += [switch[value]] if isinstance(value, bool) else [f"--{name}", str(value)]
        return words

    def lines(self, group: str) -> list[str]:
        """`--name=value` of the options of one group that are set, in order."""
        values = {option.name: getattr(self, option.name) for option in _of_group(group)}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _of_group(group: str) -> list[Field[Any]]:
    return [option for option in fields(SlurmOptions) if option.metadata.get("group") == group]


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
