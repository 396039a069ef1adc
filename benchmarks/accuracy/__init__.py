"""Studies that compare the plan with published runs, with engines that were measured, and with the scaling book.

Each study is a module that prints a table: `python -m benchmarks.accuracy.memory_cases`, `… .speed_cases`,
`… .scaling_book`.
"""

import json
from pathlib import Path
from typing import Any

from hpc_serve.plan import resolve

DATA = Path(__file__).parent / "data"


def published_configs() -> list[dict[str, Any]]:
    """Configs with the publisher's parameters, least and most: the catalogue's, or a config of its own with its
    source."""
    found: list[dict[str, Any]] = json.loads((DATA / "published_configs.json").read_text())["models"]
    return [{**entry, "config": entry.get("config") or dict(resolve(entry["name"]).config)} for entry in found]
