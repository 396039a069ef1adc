"""The HTTP library that the installed OpenAI SDK builds on: httpx2 since its version 3, httpx before. The two are one
API under two names; what is said here of `http` holds for both.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING

import openai
import pydantic.main

if TYPE_CHECKING:
    import httpx2 as http
else:
    _client = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    http = importlib.import_module(_client.__module__.partition(".")[0])

__all__ = ["http", "openai"]


def _free_lazy_models() -> None:
    """Renew the lock under which pydantic completes each of the SDK's classes at the first answer.

    A thread that is not there in a forked process may hold it there, and no first answer would ever be read. What that
    thread had begun is begun anew: the class is marked as incomplete until all is done.
    """
    if hasattr(pydantic.main, "_rebuild_lock"):  # not in versions before 2.14
        pydantic.main._rebuild_lock = threading.RLock()


os.register_at_fork(after_in_child=_free_lazy_models)
