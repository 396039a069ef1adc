"""The service that is measured, through the client's own transport: verified connections, its pool, its retries.

A stream that breaks is a failure here and is not continued, since the rest would be another replica's time. If requests
are split `equally`, replicas take turns; otherwise the pool chooses, as for any client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Iterator, Set
from typing import Any

import anyio.to_thread

from hpc_serve.bench.run import Split
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop
from hpc_serve.client.replicas.pool import ReplicaAddress, replica_of_file
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.exchange import AsyncServiceTransport
from hpc_serve.client.resume.stream import DONE, EVENT_END, datas
from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.vllm.metrics import read_work

_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
# An answer may take as long as it takes. The client bounds the time to connect.
_EXTENSIONS = {"timeout": {"connect": None, "read": None, "write": None, "pool": None}}


_READ_TIMEOUT_S = 5.0


class BenchError(HpcServeError):
    """The service cannot be measured so; the text says why."""


class BenchWatch(ServiceWatch):
    """A watch of a service; its replicas take turns while `takes_turns`."""

    takes_turns = False
    _turns = itertools.count()

    def pick(self, tried: Set[str] = frozenset(), begins: list[int] | None = None) -> ReplicaAddress | None:
        """Return the next replica that was not tried; if they take no turns, the replica that the pool chooses."""
        if not self.takes_turns:
            return super().pick(tried, begins)
        names = sorted(replica.name for replica in self.pool.others(tried))
        if not names:
            return super().pick(tried)
        chosen = names[next(self._turns) % len(names)]
        return super().pick(tried | (set(names) - {chosen}))


class BenchService:
    """One service, for one event loop. `replicas` are the names of the replicas that are ready."""

    def __init__(self, store: ServiceStore, name: str, split: Split) -> None:
        self.name = name
        self.split: Split = split
        self.watch = BenchWatch(store, name)
        self.watch.takes_turns = split == "equally"
        self._transport = AsyncServiceTransport(self.watch, resume=False)

    @property
    def model(self) -> str:
        return self.watch.model

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(sorted(replica_of_file(replica.name) for replica in self.watch.pool.others(frozenset())))

    @property
    def last_replica(self) -> str:
        """Return the name of the replica that answered last in this task."""
        return self.watch.last_replica.name or ""

    async def ready(self, wait: Wait = None) -> None:
        """Return once all replicas are known that are ready. Raises what `connect` raises, and BenchError if the engine
        has no completions, as that of an embedder, a reranker or a speech model.
        """
        await wait_for_replica(self.watch, WaitPolicy(wait), InLoop())
        await anyio.to_thread.run_sync(self.watch.refresh)
        status, _ = await self._whole("/v1/completions", b"{}")
        if status == 404:
            raise BenchError(
                f"{self.name} generates no text from prompts, which is what `bench` measures. Use `vllm bench serve` "
                "with the address of `hpc-serve env`, and --backend openai-embeddings, vllm-rerank or openai-audio."
            )

    @property
    def is_here(self) -> bool:
        """Whether one of its engines runs on this node."""
        records = [replica.record for replica in self.watch.status.replicas if replica.record is not None]
        names = {node.name for record in records for node in record.nodes}
        own = {os.environ.get("SLURMD_NODENAME"), socket.gethostname()}  # the two may differ
        return not own.isdisjoint(names) or any(record.cluster == "local" for record in records)

    async def generated_tokens(self) -> float | None:
        """Return the tokens that its engines have generated since they started. None if one does not say."""
        texts = [await self._read("/metrics") for _ in self.turns()]
        counts = [read_work(text.decode(errors="replace")).generation_tokens for text in texts]
        return None if None in counts else sum(filter(None, counts))

    async def version(self) -> str:
        """Return the version of an engine of it, "" if it does not say."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(await self._read("/version"))["version"])
        return ""

    async def _read(self, path: str) -> bytes:
        """Return the body of what is not asked of the model. Empty if there is none in time."""
        with contextlib.suppress(Exception):
            status, data = await asyncio.wait_for(self._whole(path, method="GET"), _READ_TIMEOUT_S)
            return data if status == 200 else b""
        return b""

    def turns(self) -> Iterator[int]:
        """Count the ready replicas; meanwhile each request goes to the next of them."""
        self.watch.takes_turns = True
        try:
            yield from range(len(self.replicas))
        finally:
            self.watch.takes_turns = self.split == "equally"

    async def send(self, path: str, body: bytes, method: str = "POST") -> http.Response:
        """Return the answer to a request; its body was not read. Raises what the client's transport raises."""
        headers = {**_HEADERS, "content-length": str(len(body))}
        request = http.Request(method, f"http://service{path}", headers=headers, content=body, extensions=_EXTENSIONS)
        return await self._transport.handle_async_request(request)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of a whole answer. Raises BenchError if it is a refusal."""
        status, data = await self._whole(path, json.dumps(body).encode())
        if status != 200:
            raise BenchError(f"{self.name} answered {path} with HTTP {status}: {refusal(data)}")
        return json.loads(data)

    async def _whole(self, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
        """Return status and body of an answer. Raises BenchError where no replica gives one."""
        try:
            response = await self.send(path, body, method)
            try:
                return response.status_code, await response.aread()
            finally:
                await response.aclose()
        except http.HTTPError as error:
            raise BenchError(
                f"{self.name} does not answer {path}: {one_line(error)}. "
                f"See what happened: hpc-serve status {self.name}"
            ) from error

    async def close(self) -> None:
        await self._transport.aclose()


def refusal(data: bytes) -> str:
    """Return the reason in the body of a refusal, as one line."""
    try:
        return error_text(json.loads(data))
    except ValueError:
        return one_line(data.decode(errors="replace"))


class AnswerReader:
    """One answer of a stream of completions or chat. Times are those of the caller's clock, in seconds.

    A piece counts as `vllm bench serve` counts it: each event with a choice, also one without text, since a token may
    have none.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._last_s = start_s
        self._rest = b""
        self._texts: list[str] = []
        self.ttft_s: float | None = None
        self.itls_s: list[float] = []
        self.input_len: int | None = None
        self.output_len: int | None = None
        self.error = ""
        self.is_done = False

    @property
    def latency_s(self) -> float:
        """Return the seconds from the start to the last piece."""
        return self._last_s - self._start_s

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, data: bytes, now_s: float) -> None:
        """More bytes of the body have come."""
        whole, end, self._rest = (self._rest + data).rpartition(EVENT_END)
        for event in datas(whole + end):
            self._read(event, now_s)

    def failure(self) -> str:
        """Why this is no whole answer; "" if it is one."""
        if self.error:
            return self.error
        if self.ttft_s is None:
            return "the answer has no token"
        return "" if self.is_done else "the answer ended before its end"

    def _read(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = self.error or f"the engine sent what is no JSON: {data[:100]!r}"
            return
        if not isinstance(event, dict):
            self.error = self.error or f"the engine sent no object: {data[:100]!r}"
        elif "error" in event:
            self.error = self.error or error_text(event)
        else:
            self._note(event, now_s)

    def _note(self, event: dict[str, Any], now_s: float) -> None:
        if choices := event.get("choices"):
            if self.ttft_s is None:
                self.ttft_s = now_s - self._start_s
            else:
                self.itls_s.append(now_s - self._last_s)
            self._last_s = now_s
            choice = choices[0]
            delta = choice.get("delta") or {}
            self._texts.append(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
            if choice.get("finish_reason") in ("abort", "error"):
                self.error = self.error or f"the engine ended the answer: {choice['finish_reason']}"
        if usage := event.get("usage"):
            self.input_len = usage.get("prompt_tokens", self.input_len)
            self.output_len = usage.get("completion_tokens", self.output_len)


def error_text(answer: Any) -> str:
    """Return the message of an OpenAI error object, in one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return one_line(error.get("message", error) if isinstance(error, dict) else error)


def one_line(text: object) -> str:
    """Return the beginning of a text as one line."""
    return " ".join(str(text).split())[:300]
