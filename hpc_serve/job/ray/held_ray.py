"""Ray on one node, in two steps: its program is imported at once, and is told the rest later.

The imports run while launchers find each other and check their nodes, so they do not lengthen the start. The launcher's
role decides what Ray is told. The child's own program is `ray_start`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

from hpc_serve.job.machine.log_setup import print_line
from hpc_serve.job.machine.process import Child
from hpc_serve.job.run.parts import Parts, StopOrder


class HeldRay:
    """A part of the run that is called `name`. It ends the run by its end from `release` on."""

    def __init__(self, name: str, parts: Parts, *, grace_s: float, on_line: Callable[[str], None] = print_line) -> None:
        self._name, self._parts, self._grace_s, self._on_line = name, parts, grace_s, on_line
        self._child: Child | None = None

    async def begin(self, environ: Mapping[str, str]) -> None:
        """Start the child, which imports and waits. `environ` has what Ray reads while it is imported."""
        child = await self._parts.start_child(
            self._name,
            [sys.executable, "-u", "-m", "hpc_serve.job.ray.ray_start"],
            environ,
            on_line=self._on_line,
            told=True,
        )
        self._parts.add_child(StopOrder.RAY, child, grace_s=self._grace_s)
        self._child = child

    async def release(self, argv: Sequence[str], environ: Mapping[str, str], *, watch: Sequence[str] = ()) -> None:
        """Have it become `argv` with exactly `environ`. `watch` are the words of `ray_nodes`, for Ray's head.

        Raises PartFailedError if there is no such command.
        """
        assert self._child is not None
        self._parts.require_command(self._name, argv[0], environ)
        order = {"argv": list(argv), "environ": dict(environ), "watch": list(watch)}
        self._child.tell(json.dumps(order), is_last=not watch)
        self._parts.end_with(self._child)

    def end_watch(self) -> None:
        """Have Ray's nodes be looked at no more."""
        if self._child is not None:
            self._child.tell()
