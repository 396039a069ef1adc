"""Gateways that the load's user starts, and a program of another kind that asks through them.

That program knows the OpenAI SDK and the paths of sockets, nothing of hpc_serve. When a gateway is gone it asks the
next one, from the beginning.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from hpc_serve.client.replicas.sdk import http
from tests.cluster import wait_for

START_S = 180.0
MODULE = ("-m", "hpc_serve.cli", "gateway")
GONE = (openai.APIConnectionError, http.TransportError)


class Gateways:
    """So many gateways to one service, each on a socket of its own in a private folder of this node."""

    def __init__(self, service: str, count: int, *, wait_s: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hpc-serve-load-"))
        self._paths = [self._folder / f"{place}.sock" for place in range(count)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, *MODULE, service, "--wait", f"{wait_s:g}s", "--socket", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for path in self._paths
        ]

    def wait(self) -> None:
        """Return once all of them take connections."""
        for path in self._paths:
            wait_for(lambda: _listens(path), START_S, what=f"the gateway at {path}")  # noqa: B023

    def clients(self) -> list[openai.OpenAI]:
        """A client of each."""
        return [_client(path) for path in self._paths]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def ask_first_that_is_there(clients: list[openai.OpenAI], ask: Callable[[Any], None], anew: Callable[[], None]) -> None:
    """Ask one after the other until one answers to the end; `anew` forgets what had come before."""
    for place, client in enumerate(clients):
        try:
            ask(client)
        except GONE:
            if place == len(clients) - 1:
                raise
            anew()
        else:
            return


def _client(path: Path) -> openai.OpenAI:
    transport = http.HTTPTransport(uds=str(path))
    client = openai.DefaultHttpxClient(transport=transport, trust_env=False)
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
