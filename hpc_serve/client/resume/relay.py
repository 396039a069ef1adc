"""Passes a stream on to its user, and says how it goes on after a break: what to ask, what of the answer to show. Pure.

While all is well, bytes pass as they came, up to the end of an event, and nothing of them is read. After a break they
are read, and the events of the next engine are written as if the first one had sent them.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_serve.client.resume.stream import (
    CHAT,
    COMPLETIONS,
    DONE,
    DONE_EVENT,
    EVENT_END,
    KEPT,
    START,
    CannotResumeError,
    Chunk,
    Received,
    StreamPosition,
    StreamRequest,
    datas,
    event,
    text_of,
)

# How an engine that is failing ends a stream. Text that holds the same is escaped, so it reads otherwise.
_ERROR = b'data: {"error"'
_ABORT = b'"finish_reason":"abort"'

# More tokens than this are not made again, nor looked through one by one, if it can be helped.
MANY_TOKENS = 24
CONTEXT_TOKENS = 8
HALF = "\N{REPLACEMENT CHARACTER}"  # what the text of half a character is


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to a replica; the body is JSON, b"" for a GET."""

    method: str
    path: str
    content: bytes = b""


Steps = Generator[Ask, Any, Ask]
"""Requests whose JSON answers are needed, one by one; the last one's answer is a stream."""


class Relay:
    """One stream between its engines and its user. `failure` is why its engine is to be left, "" while all is well.

    `is_continued`: its last engine was given the beginning of the answer.
    """

    def __init__(self, request: StreamRequest) -> None:
        self.request = request
        self.failure = ""
        self._received = Received(request)
        self._raw: list[bytes] = []
        self._waiting = b""
        self._is_read = False
        self._is_done = False
        self._next_place: StreamPosition | None = None
        self._unseen = ""
        self.is_continued = False
        self._mark: dict[str, Any] | None = None

    def feed(self, data: bytes) -> bytes:
        """What came from the engine; returns what the user gets."""
        if self._waiting:
            data = self._waiting + data
            self._waiting = b""
        if not data.endswith(EVENT_END):
            end = data.rfind(EVENT_END) + len(EVENT_END) if EVENT_END in data else 0
            data, self._waiting = data[:end], data[end:]
        if _ERROR in data or _ABORT in data:
            data = self._until_failure(data)
        if self._is_read:
            return b"".join(map(self._show, datas(data)))
        if data:
            self._raw.append(data)
        return data

    @property
    def is_done(self) -> bool:
        """Whether the user has the end of the stream."""
        return self._is_done or (bool(self._raw) and self._raw[-1].endswith(DONE_EVENT))

    def _until_failure(self, data: bytes) -> bytes:
        passed = b""
        for text in data.split(EVENT_END)[:-1]:
            whole = text + EVENT_END
            if whole.startswith(_ERROR) and (why := _failure_in(whole)):
                self.failure = why
                break
            if _ABORT in whole:
                self.failure = "it aborted the request"
                break
            passed += whole
        return passed

    # -- after a break

    def read(self) -> Received:
        """The engine is gone: read what the user has. An event that had not come whole is forgotten."""
        if not self._is_read:
            try:
                for data in datas(b"".join(self._raw)):
                    self._received.add(json.loads(data))
            except (ValueError, TypeError, KeyError, AttributeError):
                self._received.obstacle = "the engine sent what is no part of an answer"
            self._raw = []
        self._waiting, self.failure = b"", ""
        self._is_read = True
        return self._received

    def rest(self) -> bytes | None:
        """The end of the stream, where all tokens had come; None where they had not."""
        received = self.read()
        if len(received.finished) < self.request.answers:
            return None
        usage = b""
        if self.request.wants_usage and not received.has_usage:
            if received.prompt_ids is None:
                return None
            usage = event({**received.head, "choices": [], "usage": received.usage})
        self._is_done = True
        return usage + DONE_EVENT

    def steps(self) -> Steps:
        """What to ask another replica. Raises CannotResumeError if the stream cannot go on."""
        request, received = self.request, self.read()
        if received.is_begun and received.obstacle:
            raise CannotResumeError(received.obstacle)
        place = (yield from self._find_place()) if received.is_begun else START
        self._next_place, self.is_continued = place, bool(place.tokens)
        if not self.is_continued:
            return Ask(method="POST", path=request.path, content=request.content)
        if received.prompt_ids is None:
            raise CannotResumeError("the engine sent no token ids of the prompt")
        prefix = self._prefix
        most = request.most_tokens
        if most is None:
            models = yield Ask(method="GET", path=f"{prefix}/models")
            most = _context_length(models, request.body.get("model")) - len(received.prompt_ids)
        body = {name: value for name, value in request.body.items() if name in KEPT}
        body["prompt"] = [*received.prompt_ids, *received.ids[: place.tokens]]
        body["max_tokens"] = most - place.tokens
        body["min_tokens"] = max(0, (request.body.get("min_tokens") or 0) - place.tokens)
        body["return_token_ids"] = True
        return Ask(method="POST", path=prefix + COMPLETIONS, content=json.dumps(body, separators=(",", ":")).encode())

    @property
    def _prefix(self) -> str:
        return self.request.path[: -len(CHAT if self.request.is_chat else COMPLETIONS)]

    def _find_place(self) -> Generator[Ask, Any, StreamPosition]:
        self._unseen = ""
        place = self._received.find_place()
        if place is None:
            return (yield from self._look_for_place())
        if len(self._received.ids) - place.tokens > MANY_TOKENS and not self.request.overlap:
            with suppress(CannotResumeError):
                return (yield from self._look_for_place())
        return place

    def _look_for_place(self) -> Generator[Ask, Any, StreamPosition]:
        """The place where the text that was shown ends, by the text that an engine has for the last tokens."""
        received = self._received
        known = received.place_before(len(received.text))
        prompt, shown = received.prompt_ids or [], received.text[known.characters :]
        ids = [*prompt, *received.ids]
        first = max(0, len(prompt) + known.tokens - CONTEXT_TOKENS)  # text depends on the tokens before
        before = yield from self._text_of(ids[first : len(prompt) + known.tokens])
        for tokens in range(len(received.ids), max(known.tokens, len(received.ids) - MANY_TOKENS), -1):
            text = yield from self._text_of(ids[first : len(prompt) + tokens])
            unseen = text[len(before + shown) :]
            if not text.startswith(before + shown) or unseen.endswith(HALF) or received.may_stop_within(shown + unseen):
                continue
            self._unseen = unseen
            return StreamPosition(tokens=tokens, characters=len(received.text) + len(unseen))
        raise CannotResumeError("it ended within a token, or where a stop string may have begun")

    def _text_of(self, ids: list[int]) -> Generator[Ask, Any, str]:
        if not ids:
            return ""
        path = self._prefix.removesuffix("/v1") + "/detokenize"
        content = json.dumps({"model": self.request.body.get("model"), "tokens": ids}).encode()
        answer = yield Ask(method="POST", path=path, content=content)
        if not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
            raise CannotResumeError("another replica does not say what text its tokens have")
        return str(answer["prompt"])

    def go_on(self, replica: str) -> None:
        """That replica answers the last of `steps`: what it sends is fed from now on."""
        assert self._next_place is not None
        received = self._received
        if received.is_begun:
            standing = received.go_on_from(self._next_place, unseen=self._unseen)
            self._mark = {"at_token": standing, "exact": self.request.is_exact, "replica": replica}
        if not received.chunks:
            self._is_read = False  # nothing was shown: it is a new stream

    def _show(self, data: bytes) -> bytes:
        """One event of a later engine, as the first one would have sent it."""
        if data == DONE:
            self._is_done = True
            return DONE_EVENT
        chunk: Chunk = json.loads(data)
        received = self._received
        head = received.head
        if self.is_continued and self.request.is_chat:
            chunk["choices"] = [_as_chat(choice) for choice in chunk.get("choices") or ()]
        elif not _is_new(chunk, received.roles):
            received.add(chunk)
            received.chunks.pop()
            return b""
        chunk = received.add({**chunk, **head})
        if chunk.get("usage"):
            chunk["usage"] = received.usage
        if self._mark is not None:
            chunk["resumed"], self._mark = self._mark, None
        return event(chunk)


def _failure_in(whole: bytes) -> str:
    """Why an engine failed, from its error event; "" if it is the request's own fault."""
    try:
        error = json.loads(next(datas(whole)))["error"]
        code = int(error.get("code") or 500)
        return "" if 400 <= code < 500 else f"it failed: {error.get('message')}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return "it failed"


def _context_length(models: Any, model: object) -> int:
    """Tokens of prompt and answer together, from an engine's list of models."""
    for entry in models.get("data") or () if isinstance(models, dict) else ():
        if entry.get("id") == model and isinstance(entry.get("max_model_len"), int):
            return int(entry["max_model_len"])
    raise CannotResumeError("the engine does not say how long an answer may be")


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    text = text_of(choice)
    rest = {name: value for name, value in choice.items() if name not in ("text", "prompt_logprobs")}
    return {**rest, "delta": {"content": text}}


def _is_new(chunk: Chunk, roles: set[int]) -> bool:
    """Whether a chunk of a repeated stream is more than the role that the user has already."""
    choices = chunk.get("choices") or ()
    return not choices or any(
        choice.get("index", 0) not in roles
        or "role" not in (choice.get("delta") or {})
        or bool(text_of(choice))
        or bool(choice.get("token_ids"))
        for choice in choices
    )
