"""The load: a user's program that keeps requests in flight and writes down what became of each, one JSON line each.

    python -m tests.faults.load SERVICE --out FILE

It knows the service by `hpc_serve.client` alone (or an OpenAI base URL). Half of the requests are streams, half are
chats; they go through one shared client in threads, one asyncio client, programs that connect anew for each request,
and plain OpenAI clients of gateways that it starts (`--gateways`). Every answer is compared with the unbroken one. A
request that does not end within the bound is written down as hung, and another one takes its place. SIGTERM ends the
program once every request has an outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import openai

import hpc_serve.client
from hpc_serve.errors import HpcServeError
from tests.faults.gateways import Gateways, ask_first_that_is_there
from tests.faults.outcomes import PAUSE_S
from tests.support.stub_engine import chat_context, greedy_answer

# What cannot be resumed half-way: such a stream may end with a typed error.
VARIANTS: dict[str, dict[str, Any]] = {
    "two": {"n": 2},
    "logprobs": {"logprobs": 1},
    "tools": {"tools": [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]},
}
STEP_S = 0.1
PAUSE_AFTER_FAILURE_S = 0.25


@dataclass
class Request:
    """One request, and what has come of it so far. Times are of the monotonic clock, which all processes share."""

    name: str
    client: str
    is_chat: bool
    is_stream: bool
    most: int | None
    has_usage: bool
    variant: str
    age_at_start_s: float
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    gap_s: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    pieces: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    finish: str | None = None
    tokens: int | None = None

    @property
    def question(self) -> str:
        return f"Request {self.name}: say something."

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.question}]

    def fault_of(self, length: int) -> str:
        """What is wrong with the answer, compared with the unbroken one; "" if nothing is."""
        unbroken = greedy_answer(chat_context(self.messages) if self.is_chat else self.question, length).split(" ")
        expected = " ".join(unbroken[: self.most])
        if self.variant == "tools":
            expected = f'{{"words": "{expected}"}}'
        texts = ["".join(pieces) for pieces in self.pieces.values()]
        if len(texts) != (2 if self.variant == "two" else 1):
            return f"{len(texts)} choices"
        for text in texts:
            if text == expected:
                continue
            pairs = enumerate(zip(text, expected, strict=False))
            common = next((place for place, (got, due) in pairs if got != due), min(len(text), len(expected)))
            return f"the text differs after {common} of {len(expected)} characters: {text[common : common + 40]!r}"
        finish = "length" if self.most is not None and self.most < length else "stop"
        finish = "tool_calls" if self.variant == "tools" else finish
        if self.finish != finish:
            return f"finish_reason {self.finish!r}, not {finish!r}"
        if self.has_usage and self.tokens != len(unbroken[: self.most]):
            return f"usage says {self.tokens} tokens, not {len(unbroken[: self.most])}"
        return ""

    def add(self, answer: Any) -> None:
        """The whole answer, or a chunk of it, has come."""
        if answer.usage:
            self.tokens = answer.usage.completion_tokens
        if not answer.choices:
            return
        choice = answer.choices[0]
        self.finish = choice.finish_reason or self.finish
        self.pieces[choice.index].append(self._text_of(choice))
        now = time.monotonic()
        before = self.last or self.started
        self.gap_s = max(self.gap_s, now - before)
        if now - before >= PAUSE_S:
            self.pauses.append((before, now))
        self.first, self.last = self.first or now, now

    def begin_anew(self) -> None:
        """What had come of the answer is forgotten; its user has waited since."""
        self.pieces.clear()
        self.finish = self.tokens = None

    def _text_of(self, choice: Any) -> str:
        if not self.is_chat:
            return choice.text
        message = choice.delta if self.is_stream else choice.message
        if self.variant == "tools":
            return "".join(call.function.arguments or "" for call in message.tool_calls or ())
        return message.content or ""


class Load:
    """The requests in flight, and the file of outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_stopping = False
        self._out = options.out.open("a", buffering=1)
        self._lock = threading.Lock()
        self._in_flight: dict[str, tuple[Request, Any]] = {}
        self._names = map("{}-{}".format, itertools.repeat(secrets.token_hex(3)), itertools.count())
        self._lived_s = 0.0  # a program that was frozen has not waited in that time
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()

    # -- clients

    def connect(self) -> tuple[Any, str]:
        if self.options.base_url:
            return openai.OpenAI(base_url=self.options.base_url, api_key=self._api_key), self.options.service
        client = hpc_serve.client.connect(self.options.service, wait=self.options.wait)
        return client, client.model

    async def connect_async(self) -> tuple[Any, str]:
        if self.options.base_url:
            return openai.AsyncOpenAI(base_url=self.options.base_url, api_key=self._api_key), self.options.service
        client = await hpc_serve.client.connect_async(self.options.service, wait=self.options.wait)
        return client, client.model

    @property
    def _api_key(self) -> str:
        return self.options.api_key_file.read_text().strip() if self.options.api_key_file else "none"

    # -- the run

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_stopping", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        options = self.options
        gateways = Gateways(options.service, options.gateways, wait_s=options.wait) if options.gateways else None
        shared = self.connect()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        shared_async = asyncio.run_coroutine_threadsafe(self.connect_async(), self._loop).result()
        if gateways is not None:
            gateways.wait()
        for place in range(options.in_flight):
            if place < options.fresh:
                self._start_thread(place, None)
            elif gateways is not None and place % 8 >= 6:
                clients = gateways.clients()
                order = clients[place % len(clients) :] + clients[: place % len(clients)]
                self._start_thread(place, (order, options.service))
            elif place % 4 < 2:
                self._start_thread(place, shared)
            else:
                self._start_task(place, shared_async)
        while not self.is_stopping or self._in_flight:
            before = time.monotonic()
            time.sleep(STEP_S)
            self._lived_s += min(time.monotonic() - before, 10 * STEP_S)
            self._replace_hung()
        if gateways is not None:
            gateways.close()
        self._out.close()

    def _start_thread(self, place: int, shared: tuple[Any, str] | None) -> None:
        threading.Thread(target=self._ask_in_thread, args=(place, shared), daemon=True).start()

    def _start_task(self, place: int, shared: tuple[Any, str]) -> None:
        def start() -> None:
            task = self._loop.create_task(self._ask_in_loop(place, shared))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    def _replace_hung(self) -> None:
        with self._lock:
            requests = list(self._in_flight.values())
        for request, replace in requests:
            is_hung = self._lived_s - request.age_at_start_s > self.options.bound
            if is_hung and self._end(request, "hung") and not self.is_stopping:
                replace()

    # -- requests

    def _begin(self, place: int, turn: int, client: str, replace: Any) -> Request:
        is_stream, is_chat = bool(place % 2), bool(turn % 2)
        kinds = ["", *(name for name in VARIANTS if is_chat or name != "tools")]
        variant = random.choice(kinds) if is_stream and turn % 3 == 0 else ""
        with self._lock:
            request = Request(
                name=next(self._names),
                client=client,
                is_chat=is_chat,
                is_stream=is_stream,
                # A completion without a bound has 16 tokens, as vLLM's; the stub's would have all of them.
                most=None
                if is_chat and turn % 3 == 0
                else random.randint(self.options.tokens // 2, self.options.tokens),
                has_usage=not variant and (not is_stream or turn % 4 < 2),
                variant=variant,
                age_at_start_s=self._lived_s,
            )
            self._in_flight[request.name] = request, replace
        return request

    def _end(self, request: Request, outcome: str, error: BaseException | None = None, *, wrong: str = "") -> bool:
        """Write the outcome down; False if the request had one already."""
        with self._lock:
            if self._in_flight.pop(request.name, None) is None:
                return False
            values = {
                "name": request.name,
                "client": request.client,
                "api": "chat" if request.is_chat else "completion",
                "stream": request.is_stream,
                "outcome": outcome,
                "started": request.started,
                "first": request.first,
                "ended": time.monotonic(),
                "gap_s": round(request.gap_s, 3),
                "pauses": request.pauses,
                "tokens": self.options.tokens if request.most is None else min(request.most, self.options.tokens),
                "variant": request.variant,
            }
            if error is not None:
                values["error"] = f"{type(error).__module__}.{type(error).__qualname__}"
                values["text"] = str(error)[:500]
                values["is_typed"] = isinstance(error, openai.OpenAIError | HpcServeError)
            elif outcome == "wrong":
                values["text"] = wrong
            self._out.write(json.dumps(values) + "\n")
            return True

    def _judge(self, request: Request) -> bool:
        wrong = request.fault_of(self.options.tokens)
        return self._end(request, "wrong" if wrong else "right", wrong=wrong)

    def _arguments(self, request: Request, model: str) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": model, "temperature": 0, "stream": request.is_stream}
        asked |= {"messages": request.messages} if request.is_chat else {"prompt": request.question}
        if request.most is not None:
            asked["max_tokens"] = request.most
        if request.is_stream and request.has_usage:
            asked["stream_options"] = {"include_usage": True}
        asked |= VARIANTS.get(request.variant, {})
        if request.is_chat and "logprobs" in asked:
            asked["logprobs"] = True  # a number in completions, not in chats
        return asked

    def _ask_in_thread(self, place: int, shared: tuple[Any, str] | None) -> None:
        for turn in itertools.count():
            if self.is_stopping:
                return
            through_gateway = shared is not None and isinstance(shared[0], list)
            name = "gateway" if through_gateway else "threads" if shared else "fresh"
            request = self._begin(place, turn, name, lambda: self._start_thread(place, shared))
            try:
                client, model = shared or self.connect()
                ask = partial(self._ask, request, model)
                if through_gateway:
                    ask_first_that_is_there(client, ask, request.begin_anew)
                else:
                    ask(client)
                if not shared:
                    client.close()
            except Exception as error:
                if not self._end(request, "error", error):
                    return
                time.sleep(PAUSE_AFTER_FAILURE_S)
                continue
            if not self._judge(request):
                return

    def _ask(self, request: Request, model: str, client: Any) -> None:
        api = client.chat.completions if request.is_chat else client.completions
        answer = api.create(**self._arguments(request, model))
        if not request.is_stream:
            request.add(answer)
            return
        with answer:
            for chunk in answer:
                request.add(chunk)

    async def _ask_in_loop(self, place: int, shared: tuple[Any, str]) -> None:
        client, model = shared
        for turn in itertools.count():
            if self.is_stopping:
                return
            request = self._begin(place, turn, "asyncio", lambda: self._start_task(place, shared))
            try:
                api = client.chat.completions if request.is_chat else client.completions
                answer = await api.create(**self._arguments(request, model))
                if request.is_stream:
                    async with answer:
                        async for chunk in answer:
                            request.add(chunk)
                else:
                    request.add(answer)
            except Exception as error:
                if not self._end(request, "error", error):
                    return
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
                continue
            if not self._judge(request):
                return


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.load", description=__doc__)
    parser.add_argument("service")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--fresh", type=int, default=2, help="of these, programs that connect for each request")
    parser.add_argument("--tokens", type=int, default=40, help="length of an answer (the stub's --stub-words)")
    parser.add_argument("--bound", type=float, default=20.0, help="seconds after which a request counts as hung")
    parser.add_argument("--gateways", type=int, default=0, help="gateways that a quarter of the requests goes through")
    parser.add_argument("--wait", type=float, default=60.0, help="connect's `wait`")
    parser.add_argument("--base-url", help="an OpenAI base URL to use in place of hpc_serve.client")
    parser.add_argument("--api-key-file", type=Path)
    return parser.parse_args(words)


def log_decisions(file: Path) -> None:
    """What the clients decide, with the clock of the requests' lines."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: bool(setattr(record, "msg", f"{time.monotonic():.3f} {record.msg}")) or True)
    logger = logging.getLogger("hpc_serve.client")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    logger.propagate = False


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    log_decisions(options.out.with_suffix(".log"))
    Load(options).run()
    sys.stdout.flush()
    os._exit(0)  # threads of requests that hang are left behind
