"""Runs this checkout's Python as another user of the machine, in some groups; only root can."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def run_as(user: int, home: Path, *argv: str, groups: Sequence[str | int] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python with `argv` as a user by number, who need have no account, in these groups alone.

    Groups are given by name or number.
    """
    try:
        return subprocess.run(
            [sys.executable, *argv],
            user=user,
            group=user,
            extra_groups=[one if isinstance(one, int) else grp.getgrnam(one).gr_gid for one in groups],
            env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except PermissionError as error:
        pytest.skip(f"this Python is in a folder that other users cannot reach: {error.filename}")
