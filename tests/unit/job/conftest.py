from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _log_as_before():
    """A program under test sets up logging for its whole process."""
    logger = logging.getLogger("hpc_serve")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
