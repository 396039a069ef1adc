"""The HTTP library that the installed OpenAI SDK builds on: httpx2 since its version 3, httpx before. The two are one
API under two names; what is said here of `http` holds for both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    import httpx2 as http
else:
    _client = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    http = importlib.import_module(_client.__module__.partition(".")[0])

__all__ = ["http", "openai"]
