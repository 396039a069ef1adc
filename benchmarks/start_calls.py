"""What the launchers of one start ask their kernels for: messages, waits, files of the home. Pure: strace's lines in.

Only the launchers' own threads are followed (`strace -f -b execve`): what Ray and the engine do is theirs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_SENT = ("sendto", "sendmsg", "sendmmsg", "write", "writev")
_WAITED = ("epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "ppoll", "select", "pselect6", "clock_nanosleep")
_CALL = re.compile(r"(?P<pid>\d+) +(?:(?P<name>\w+)\(|<\.\.\. (?P<resumed>\w+) resumed>)(?P<rest>.*)")
_CHILD = re.compile(r" = (\d+)$")
_TCP = re.compile(r"\d+<TCP")
MESSAGES, WAITS, FILES = "messages over TCP", "waits", "calls on files of the home"


def traced(command: str, file: str) -> str:
    """A shell's words that run `command` and write its calls to `file`, a shell's word too."""
    watched = "%file,%desc,%network,clone,clone3,clock_nanosleep"
    strace = f'exec strace -f -b execve -yy -qq -s 0 --seccomp-bpf -e trace={watched} -o {file} "$@"'
    return f"bash -c '{strace}' strace {command}"


def count(lines: Iterable[str], home: str) -> Counter[str]:
    """The calls of the first process in `lines` and of its threads, by kind. A call in two parts counts once."""
    found: Counter[str] = Counter()
    ours: set[str] = set()
    makes_thread: dict[str, bool] = {}
    for line in lines:
        if (call := _CALL.match(line)) is None:
            continue
        pid, rest = call["pid"], call["rest"]
        ours = ours or {pid}
        if pid not in ours:
            continue
        name = call["name"] or call["resumed"]
        if name in ("clone", "clone3"):
            is_thread = "CLONE_THREAD" in rest or makes_thread.pop(pid, False)
            if child := _CHILD.search(rest):
                ours |= {child[1]} if is_thread else set()
            else:
                makes_thread[pid] = is_thread
        if call["name"] is None:
            continue
        found[MESSAGES] += name in _SENT and _TCP.match(rest) is not None
        found[WAITS] += name in _WAITED
        found[FILES] += home in rest
    return found
