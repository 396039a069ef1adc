"""Calls of the system that fail."""

from __future__ import annotations

import os
from typing import Any

import pytest


def refuse(monkeypatch: pytest.MonkeyPatch, module: Any, call: str, number: int) -> None:
    """Let a call of `os`, `fcntl` or the like fail with an error of this number."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, call, fail)
