"""What a forked process does with the clients that it inherits: it makes its own connections, threads and locks.

Two processes that read from one connection take each other's answers. A lock that another thread held at the fork stays
locked in the new process for ever, and its threads are not there.

Locks inside of OpenSSL cannot be made anew. It takes one to make and to free each connection and each context, so that
what runs at a fork does neither: a forked process that never uses a client is not held up by the one that it inherits.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that is made anew in a forked process."""

    def after_fork(self) -> None: ...


_all: weakref.WeakSet[Inherited] = weakref.WeakSet()
_left: list[object] = []


def renew_after_fork(thing: Inherited) -> None:
    """Have `after_fork` called in each process that is forked from now on, before its own code runs."""
    _all.add(thing)


def leave_behind(inherited: object) -> None:
    """In a forked process: have something neither used nor freed, as it holds connections of the other process."""
    _left.append(inherited)


def _renew() -> None:
    for thing in list(_all):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew)
