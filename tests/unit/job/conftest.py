from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _log_as_before():
    """A program under test sets up logging for its whole process; vLLM's app lets nothing below ERROR through."""
    logger = logging.getLogger("hpc_serve")
    handlers, level, root_level = logger.handlers, logger.level, logging.root.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
    logging.root.setLevel(root_level)
