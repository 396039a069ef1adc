"""Environment variables that a site, a model or a service wants in its jobs (`env`): what they may be. Pure.

They stand in the script as they are, so a secret is refused by its name or form. `$NAME` in a site file is expanded
with the variables of the user who submits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpc_serve.errors import InvalidRequestError

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
