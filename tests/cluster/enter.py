"""Runs one command inside a host's namespaces, as a given user, as if it had been started there.

    enter.py INIT_PID USER_ID FOLDER [--foreground] -- COMMAND ...

The command gets this process's environment and streams; signals sent here reach it, its exit status is ours, and it is
killed when we are. `--foreground` keeps the terminal, for an interactive shell. Runs without this package.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import sys
import warnings  # noqa: F401  # execvpe imports it late, when the standard library may be out of sight
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def join_namespaces(init_pid: str) -> None:
    folder = f"/proc/{init_pid}/ns"
    descriptors = [os.open(f"{folder}/{kind}", os.O_RDONLY) for kind in ("uts", "ipc", "net", "pid", "mnt")]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def become(user_id: int, folder: str, foreground: bool, parent_lives: int) -> None:
    if not foreground:
        os.setsid()
    account = pwd.getpwuid(user_id)
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(user_id)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([parent_lives], [], [], 0)[0]:  # it was killed before
        os._exit(1)
    os.umask(0o022)
    os.chdir(folder)


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    (init_pid, user_id, folder), flags = arguments[:3], arguments[3:split]
    command = arguments[split + 1 :]
    foreground = "--foreground" in flags
    join_namespaces(init_pid)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent_lives, i_live = os.pipe()  # readable once this process has ended
    child = os.fork()
    if child == 0:
        try:
            os.close(i_live)
            become(int(user_id), folder, foreground, parent_lives)
            for number in FORWARDED:  # a shell that starts the tests with `&` has them ignored, by all below it
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            os.execvpe(command[0], command, os.environ)
        except (OSError, KeyError) as error:
            print(f"{command[0]}: {error}", file=sys.stderr)
            os._exit(127)

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        from_terminal = foreground and number in (signal.SIGINT, signal.SIGQUIT)
        signal.signal(number, signal.SIG_IGN if from_terminal else forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
