"""What a fault is: a function that breaks one thing of a running service, and mends it again where it heals.

A function that mends is a generator: what stands after its `yield` mends, once the fault has lasted. What it yields, if
anything, is called again and again meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault by name.

    `is_short`: it is part of the short form. `is_apart`: it runs only when it is named. `hold_s` is how long it lasts,
    or is watched, `settle_s` how long the service is watched after that. `hides_records`: programs that start meanwhile
    can only wait, so their requests have that much
    longer. `comes_and_goes`: the replica answers now and then, and no record says that it is not well. Each client must
    find out for itself, so a program that starts meanwhile has nothing to notice before its own request, whose gap
    counts. `needs_slurm`: it cannot happen on one machine. `first` are further options of `submit` for the first
    replica, `each` for every one; the first one's clock is `clock_s` ahead. `bounds`: one submission is for all,
    MIN:MAX of them. `slots`: how many requests an engine works on at once. `filesystem`: what the home is on, where it
    is not a plain folder. `token_s`: the time that the engines take for a token. A request that takes `bound_s` longer
    than its tokens do twice is hung. `has_worker`: an engine ends with its worker, as one of several ranks. `gateways`:
    how many the load's user starts. `load_node`: where the load runs, if not on the login host.
    `is_batch`: the load is a batch, and the fault itself returns what became of its lines. Of the `replicas`,
    `ready_after` are to be ready again once the fault is over.
    """

    name: str
    happens: Callable[[Any], Any]
    is_short: bool = False
    is_apart: bool = False
    hides_records: bool = False
    comes_and_goes: bool = False
    needs_slurm: bool = False
    hold_s: float = 20.0
    settle_s: float = 0.0
    first: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    bounds: str = ""
    slots: int = 64
    clock_s: int = 0
    filesystem: Literal["", "own", "lagging"] = ""
    token_s: float = 0.05
    bound_s: float = 25.0
    gateways: int = 1
    load_node: str | None = None
    has_worker: bool = False
    is_batch: bool = False
    replicas: int = 2
    ready_after: int = 2

    @property
    def words(self) -> str:
        return (self.happens.__doc__ or "").splitlines()[0]


FAULTS: dict[str, Fault] = {}


def fault(**values: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a function into FAULTS under its name, with further fields of `Fault`."""

    def enter(happens: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = happens.__name__.replace("_", "-")
        FAULTS[name] = Fault(name=name, happens=happens, **values)
        return happens

    return enter
