"""Run as a user by test_drain.py: streams of one service at once, and new requests until it refuses them.

    python tests/e2e/streams.py SERVICE NUMBER [FILE]

It prints "begun" once every stream has its first word, and removes FILE, which holds the streams, once a request was
refused. Then it prints one JSON object: how each stream ended, and what the first request was answered that was not
served.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai

import hpc_serve.client
from hpc_serve.errors import HpcServeError

MOST_S = 300.0


class Stream(threading.Thread):
    """One stream: how many pieces came, and how it ended: "stop" as the engine says, or an error."""

    def __init__(self, client: Any) -> None:
        super().__init__(daemon=True)
        self.has_begun = threading.Event()
        self.pieces, self.ending = 0, ""
        self._client = client

    def run(self) -> None:
        try:
            chunks = self._client.completions.create(model=self._client.model, prompt="1", stream=True)
            for chunk in chunks:
                if chunk.choices:
                    self.pieces += 1
                    self.ending = chunk.choices[0].finish_reason or ""
                    self.has_begun.set()
        except Exception as error:
            self.ending = f"{type(error).__name__}: {error}"
        finally:
            self.has_begun.set()


def first_refusal(client: Any) -> str:
    """Ask for one word again and again, at no other replica, until that is refused; returns how."""
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline:
        try:
            client.completions.create(model=client.model, prompt="1", max_tokens=1)
        except openai.APIStatusError as error:
            return f"{error.status_code} {error.response.headers.get('x-hpc-serve', '')}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    return "none"


def connect_without_waiting(service: str) -> Any:
    """A client whose requests wait for no replica. One that is slow to answer now is asked again."""
    deadline = time.monotonic() + MOST_S
    while True:
        try:
            return hpc_serve.client.connect(service, wait=0)
        except HpcServeError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)


def main() -> None:
    client = hpc_serve.client.connect(sys.argv[1], wait=120)
    streams = [Stream(client) for _ in range(int(sys.argv[2]))]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.has_begun.wait(MOST_S)
    replica = connect_without_waiting(sys.argv[1])
    print("begun", flush=True)
    refusal = first_refusal(replica)
    if len(sys.argv) > 3:
        Path(sys.argv[3]).unlink()
    for stream in streams:
        stream.join(MOST_S)
    print(json.dumps({"streams": [[stream.pieces, stream.ending] for stream in streams], "refusal": refusal}))


if __name__ == "__main__":
    main()
