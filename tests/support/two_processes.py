"""Which tests run in one process of `make test`: those of real engines on a cluster, those that need a cluster alone.

Each of the two processes makes one cluster, and goes through such tests in their order. Whoever is done takes from the
rest: modules with engines of their own, whole, and single unit tests.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

UNIT = "tests/unit/"


class TwoProcesses(LoadScopeScheduling):
    """Scheduling by what tests need. Where tests are shared out, only their ids are known, so modules are looked at."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return nodeid if module.startswith(UNIT) else _needs(module)


@functools.cache
def _needs(module: str) -> str:
    text = (Path(__file__).parents[2] / module).read_text()
    if "pytest.mark.slurm" not in text:
        return module
    return "engines" if "pytest.mark.engine" in text else "cluster"
