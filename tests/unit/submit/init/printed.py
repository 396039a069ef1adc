"""What commands print on clusters of several kinds: a real Slurm 22.05 (../slurm_outputs), others by hand (outputs/).

Those are written after the fields of the version that is named; names and numbers are made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent


class Printed(NamedTuple):
    """The answers of one cluster's commands."""

    config: str
    partition: str
    node: str
    associations: str = ""
    default_account: str = ""


def _text(name: str) -> str:
    return (_FOLDER / "outputs" / f"{name}.txt").read_text()


_RECORDED = json.loads((_FOLDER.parent / "slurm_outputs" / "cluster.json").read_text())
# Debian 12's: what the test cluster printed of its partitions and nodes.
SLURM_22_05 = Printed(
    config=_text("config-22.05"),
    partition=_RECORDED["partitions"]["stdout"],
    node=_RECORDED["nodes"]["stdout"],
    associations=_RECORDED["no-accounting"]["stdout"],
)
# A site with accounting: CPUs by default, whole nodes with GPUs of two types, a partition of a group, one that is down.
SLURM_24_11 = Printed(*(_text(f"{command}-24.11") for command in Printed._fields))
DF, IP, QUOTA, LMOD = (_text(command) for command in ("df", "ip", "quota", "lmod"))
