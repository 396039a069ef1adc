"""Run as a user by test_real_replicas_per_job.py: asks each of the replicas of a service, which are COUNT.

    python tests/e2e/ask_each.py SERVICE COUNT

It prints one JSON object: the replicas that the client knew (`replicas`), what each answered to one greedy request
while it had no other (`texts`), and how many of further requests, COUNT at a time, each answered (`answered`).
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hpc_serve.client

MOST_S = 600.0
TOKENS = 16
FURTHER = 8  # requests a replica


def connect_to_all(service: str, count: int, deadline: float) -> Any:
    """A client that sends requests to so many replicas; one that is slow to answer now is asked again."""
    client = hpc_serve.client.connect(service, wait=MOST_S)
    while sum(replica.state == "ready" for replica in client.replicas) < count:
        assert time.monotonic() < deadline, client.replicas
        time.sleep(0.2)
        client._watch.refresh()
    return client


def ask(client: Any) -> Any:
    """A greedy stream that has begun and is not read yet."""
    greedy = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model=client.model, prompt="The people of the place", stream=True, **greedy)


def read(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def one_each(client: Any, count: int) -> dict[str, str]:
    """So many streams at the same time: each goes to a replica that has none yet, or else fewer are returned."""
    begun = []
    for _ in range(count):
        stream = ask(client)
        begun.append((client.last_replica, stream))
    return {name: read(stream) for name, stream in begun}


def ask_and_read(client: Any) -> str:
    text = read(ask(client))
    assert text
    return str(client.last_replica)


def main() -> None:
    service, count = sys.argv[1], int(sys.argv[2])
    deadline = time.monotonic() + MOST_S
    texts: dict[str, str] = {}
    while len(texts) < count:  # a replica that seemed to be lost is left out until it has answered again
        assert time.monotonic() < deadline, texts
        client = connect_to_all(service, count, deadline)
        texts = one_each(client, count)
    with ThreadPoolExecutor(count) as threads:
        answered = Counter(threads.map(lambda _: ask_and_read(client), range(FURTHER * count)))
    shown = {replica.name: replica.address for replica in client.replicas}
    print(json.dumps({"replicas": shown, "texts": texts, "answered": answered}))


if __name__ == "__main__":
    main()
