"""sbatch's options, as a person may set them for a job or a site for all of them, checked. Pure.

Whether the partition exists is decided by Slurm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.request.option import option, option_words

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
    cpus_per_task: int | None = _sbatch("CPU cores of each node.", "N", group="share")
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
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise InvalidRequestError(f"cpus-per-task is {self.cpus_per_task}: it must be at least 1.")
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
