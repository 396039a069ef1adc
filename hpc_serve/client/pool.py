"""Which live replica a request goes to: the one with the fewest of our requests under way. Pure, but for chance."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a replica answers; `name` is its record's."""

    name: str
    host: str
    port: int


class ReplicaPool:
    """Counts requests under way by replica. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: dict[str, Target] = {}
        self._under_way: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._targets)

    def fill(self, targets: Iterable[Target]) -> None:
        """Offer these replicas and no others; counts of those that stay go on."""
        with self._lock:
            self._targets = {target.name: target for target in targets}

    def drop(self, name: str) -> None:
        """Offer a replica no more."""
        with self._lock:
            self._targets.pop(name, None)

    def take(self, tried: Set[str] = frozenset()) -> Target | None:
        """The least loaded replica not in `tried`, one of equals at random, to be given back; None if there is none."""
        with self._lock:
            # By chance among equals: many clients with one request each would all meet at the same replica.
            target = min(
                (target for name, target in self._targets.items() if name not in tried),
                key=lambda target: (self._under_way.get(target.name, 0), random.random()),
                default=None,
            )
            if target is not None:
                self._under_way[target.name] = self._under_way.get(target.name, 0) + 1
            return target

    def give_back(self, target: Target) -> None:
        """A request of `take` is over."""
        with self._lock:
            left = self._under_way[target.name] - 1
            if left:
                self._under_way[target.name] = left
            else:
                del self._under_way[target.name]
