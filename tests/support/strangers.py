"""Another user of the machine, to whom tests give files away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 64_999
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give_away(*paths: Path, user: int = STRANGER) -> None:
    """Give files, folders or links to another user. The test ends here, as skipped, if we are not root."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in paths:
        os.chown(path, user, user, follow_symlinks=False)
