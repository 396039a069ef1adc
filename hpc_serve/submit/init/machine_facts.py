"""Reads what a login node's own commands print: df, ip, quota, `module -t avail`; and /proc/net/dev. Pure.

A line that is not understood is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_serve.submit.init.facts import Interface, Mount, QuotaLine

_ADDRESS = re.compile(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+(\S+)(.*)")
_OF_CONTAINERS = re.compile(r"lo|docker\d*|virbr\d*|veth\w*|cni\d*|br-\w+|podman\d*|lxc\w*|tun\d+|tailscale\d+")


def parse_df(stdout: str, folders: Sequence[str]) -> tuple[Mount, ...]:
    """`df -PT FOLDER…`: a line for each folder in turn, after one of headings. None where their numbers differ."""
    lines = [line for line in stdout.splitlines()[1:] if line.strip()]
    found = []
    for folder, line in zip(folders, lines, strict=False):
        match = re.fullmatch(r"(.*\S)\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+\S+%\s+(/.*)", line)
        if match is not None:
            mount = Mount(
                folder=folder,
                source=match[1],
                kind=match[2],
                free_kib=int(match[5]),
                mounted_on=match[6],
            )
            found.append(mount)
    return tuple(found) if len(lines) == len(folders) else ()


def parse_ip(stdout: str) -> tuple[Interface, ...]:
    """`ip -oneline address show`: the interfaces that other machines reach, with their addresses."""
    found: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        match = _ADDRESS.match(line)
        if match and "scope global" in match[3] and not _OF_CONTAINERS.fullmatch(match[1]):
            found.setdefault(match[1], []).append(match[2])
    return tuple(Interface(name=name, addresses=tuple(addresses)) for name, addresses in found.items())


def parse_net_dev(text: str) -> tuple[Interface, ...]:
    """/proc/net/dev, where there is no `ip`: names alone."""
    names = (line.partition(":")[0].strip() for line in text.splitlines() if ":" in line)
    return tuple(Interface(name=name) for name in names if not _OF_CONTAINERS.fullmatch(name))


def parse_quota(stdout: str) -> tuple[QuotaLine, ...]:
    """`quota --no-wrap`: file system, KiB used (with * beyond the quota), quota, limit, …

    >>> parse_quota("nas:/home 18000000 50000000 52428800 210000 0 0")
    (QuotaLine(file_system='nas:/home', used_kib=18000000, limit_kib=52428800),)
    """
    found = []
    for line in stdout.splitlines():
        match = re.match(r"\s*(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)(?:\s|$)", line)
        if match is not None:
            limit = int(match[4]) or int(match[3])
            found.append(QuotaLine(file_system=match[1], used_kib=int(match[2]), limit_kib=limit))
    return tuple(found)


def parse_modules(printed: str) -> tuple[str, ...]:
    """`module -t avail`, of Lmod or of Environment Modules: one name a line, under lines that name folders."""
    names = (line.strip() for line in printed.splitlines())
    names = (re.sub(r"\s*(?:<.*>|\(.*\))$", "", name) for name in names)
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[A-Za-z][\w.+/-]*[\w+]", name)))
