"""Stand-ins for all commands that `hpc-serve init` asks, in a folder that is the whole PATH."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.submit.init.printed import Printed

_NEEDED = ("cat", "sleep")


class FakeCluster:
    """A folder of commands, and nothing else on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._folder = folder
        for name in _NEEDED:
            (folder / name).symlink_to(str(shutil.which(name)))
        monkeypatch.setenv("PATH", str(folder))

    def command(self, name: str, script: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def slurm(self, printed: Printed) -> None:
        """Slurm's commands, with these answers."""
        for name, text in printed._asdict().items():
            (self._folder / f"{name}.txt").write_text(text)
        folder = shlex.quote(str(self._folder))
        self.command("scontrol", f"for word; do :; done; cat {folder}/$word.txt")
        self.command(
            "sacctmgr",
            f'if [[ "$*" == *"show user"* ]]; then cat {folder}/default_account.txt; '
            f"else cat {folder}/associations.txt; fi",
        )
