"""The HTTP library that the installed OpenAI SDK builds on: httpx2 since its version 3, httpx before. The two are one
API under two names; what is said here of `http` holds for both. `core` is what that library keeps connections with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    import httpcore2 as core
    import httpx2 as http
else:
    _client = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    http = importlib.import_module(_client.__module__.partition(".")[0])
    core = importlib.import_module(http.__name__.replace("httpx", "httpcore"))

__all__ = ["core", "http", "openai"]
