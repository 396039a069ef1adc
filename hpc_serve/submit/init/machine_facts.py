"""Reads what a login node's own commands print: df, ip, quota, `module -t avail`. Pure.

A line that is not understood is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_serve.submit.init.facts import Mount

_ADDRESS = re.compile(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+(\S+)(.*)")
_OF_CONTAINERS = re.compile(r"lo|docker\d*|virbr\d*|veth\w*|cni\d*|br-\w+|podman\d*|lxc\w*|tun\d+|tailscale\d+")


def parse_df(stdout: str, folders: Sequence[str]) -> tuple[Mount, ...]:
    """`df -PT FOLDER…`: a line for each folder in turn, after one of headings. None where their numbers differ."""
    lines = [line for line in stdout.splitlines()[1:] if line.strip()]
    found = []
    for folder, line in zip(folders, lines, strict=False):
        match = re.fullmatch(r"(.*\S)\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+%\s+(/.*)", line)
        if match is not None:
            source, kind, _, _, free_kib, mounted_on = match.groups()
            found.append(Mount(folder=folder, source=source, kind=kind, free_kib=int(free_kib), mounted_on=mounted_on))
    return tuple(found) if len(lines) == len(folders) else ()


def parse_ip(stdout: str) -> dict[str, tuple[str, ...]]:
    """`ip -oneline address show`: the interfaces that other machines reach, with their addresses."""
    found: dict[str, tuple[str, ...]] = {}
    for line in stdout.splitlines():
        match = _ADDRESS.match(line)
        if match and "scope global" in match[3] and not _OF_CONTAINERS.fullmatch(match[1]):
            found[match[1]] = (*found.get(match[1], ()), match[2])
    return found


def parse_quota(stdout: str) -> dict[str, int]:
    """`quota --no-wrap`: file system, KiB used (with * beyond the quota), quota, limit, …

    Returns the KiB that are left, by file system.

    >>> parse_quota("nas:/home 18000000 50000000 52428800 210000 0 0")
    {'nas:/home': 34428800}
    """
    lines = (re.match(r"\s*(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)(?:\s|$)", line) for line in stdout.splitlines())
    limits = {match: int(match[4]) or int(match[3]) for match in lines if match is not None}
    return {match[1]: limit - int(match[2]) for match, limit in limits.items() if limit}


def parse_modules(printed: str) -> tuple[str, ...]:
    """`module -t avail`, of Lmod or of Environment Modules: one name a line, under lines that name folders."""
    names = (line.strip() for line in printed.splitlines())
    names = (re.sub(r"\s*(?:<.*>|\(.*\))$", "", name) for name in names)
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[A-Za-z][\w.+/-]*[\w+]", name)))
