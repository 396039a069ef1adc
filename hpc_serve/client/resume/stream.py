"""Which streams of answers may go on at another replica, and what one held so far: text, token ids, and places. Pure.

A stream goes on from token ids, so the engine is asked for them (`return_token_ids`), unless the request asks for what
a continuation cannot give: several answers, probabilities, tool calls, a grammar. Fields are those of vLLM's protocol.

An engine sends a token before its text: half a character waits for its other half, and the last characters wait until
no stop string can begin there. A place is known where the text of all tokens up to it is known; tokens after the last
such place are made again, and what the user has of them is not shown twice. relay.py asks the other replica.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# -- what is asked

COMPLETIONS = "/completions"
CHAT = "/chat/completions"
DEFAULT_MAX_TOKENS = 16  # vLLM's, for completions; a chat's is what the context leaves


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Fields that mean the same in a continuation.
KEPT = _names(
    "model frequency_penalty logit_bias presence_penalty seed stop stream stream_options temperature top_p user top_k"
    " min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos"
    " skip_special_tokens spaces_between_special_tokens allowed_token_ids bad_words priority request_id session_id"
    " cache_salt return_tokens_as_token_ids stream_interval repetition_detection"
)
# Fields that made the prompt, whose token ids are known by then; those that a continuation sets anew; and those of the
# OpenAI API that vLLM does not read.
_LEFT_OUT = _names(
    "messages prompt add_special_tokens truncate_prompt_tokens truncation_side add_generation_prompt"
    " continue_final_message documents chat_template chat_template_kwargs reasoning_effort include_reasoning"
    " max_tokens max_completion_tokens min_tokens return_token_ids tool_choice parallel_tool_calls return_prompt_text"
    " mm_processor_kwargs media_io_kwargs metadata store service_tier safety_identifier prompt_cache_key verbosity"
)
# Fields that rule a continuation out, unless they have the value that is no wish.
_RULING_OUT: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "top_logprobs": 0,
    "use_beam_search": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "suffix": "",
}
# Wishes that look at what was generated so far. A continuation takes that for its prompt.
_LOOKING_BACK = ("frequency_penalty", "presence_penalty", "repetition_detection", "bad_words", "watermarking")

# Quotes within a text are escaped, so this is a key wherever it stands: most requests need not be read.
_MAY_STREAM = re.compile(rb'"stream"\s*:\s*true').search


@dataclass(frozen=True, kw_only=True)
class StreamRequest:
    """A request for a stream. `content` is what is sent; `obstacle` says why it cannot go on once begun, or is ""."""

    path: str
    body: Mapping[str, Any]
    content: bytes
    obstacle: str = ""

    @property
    def is_chat(self) -> bool:
        return self.path.endswith(CHAT)

    @property
    def is_exact(self) -> bool:
        """Whether the tokens follow from those before them: greedy, and nothing looks back."""
        return self.body.get("temperature") == 0 and not any(self.body.get(name) for name in _LOOKING_BACK)

    @property
    def most_tokens(self) -> int | None:
        """The bound on the length of the answer; None: what the context leaves."""
        if not self.is_chat:
            return _number(self.body.get("max_tokens"), DEFAULT_MAX_TOKENS)
        return _number(self.body.get("max_completion_tokens"), _number(self.body.get("max_tokens"), None))

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.body.get("stop") or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def held_back(self) -> int:
        """How many characters the engine keeps to itself, in case a stop string begins there."""
        return 0 if self.body.get("include_stop_str_in_output") else self._longest_stop

    @property
    def overlap(self) -> int:
        """How many characters a continuation must make again, so that it sees a stop string that had begun."""
        return self._longest_stop if self.body.get("include_stop_str_in_output") else 0

    @property
    def _longest_stop(self) -> int:
        return max((len(stop) - 1 for stop in self.stops), default=0)

    @property
    def answers(self) -> int:
        """How many answers the stream holds."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        return (self.body.get("n") or 1) * (len(prompt) if several and isinstance(prompt, list) else 1)

    @property
    def wants_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))


def read_request(path: str, content: bytes, body: Any = None) -> StreamRequest | None:
    """Return the request, if it asks for a stream of tokens; None for any other. `body` is its JSON, if it was read."""
    if not path.endswith(COMPLETIONS) or not _MAY_STREAM(content):
        return None
    try:
        body = json.loads(content) if body is None else body
    except ValueError:
        return None
    if not isinstance(body, dict) or body.get("stream") is not True:
        return None
    obstacle = _obstacle(body, is_chat=path.endswith(CHAT))
    if not obstacle and body.get("return_token_ids") is None:
        content = _with_token_ids(body, content)
    return StreamRequest(path=path, body=body, content=content, obstacle=obstacle)


def _with_token_ids(body: Mapping[str, Any], content: bytes) -> bytes:
    if "return_token_ids" not in body and content.startswith(b'{"'):
        return b'{"return_token_ids":true,' + content[1:]  # nothing is encoded again
    return json.dumps({**body, "return_token_ids": True}).encode()


def _obstacle(body: Mapping[str, Any], *, is_chat: bool) -> str:
    if body.get("return_token_ids") is False:
        return "it asks for no token ids"
    if body.get("tools") and body.get("tool_choice") != "none":
        return "it may call tools"
    for name, value in body.items():
        if value is None or name in KEPT or name in _LEFT_OUT or name == "tools":
            continue
        if name in _RULING_OUT and value == _RULING_OUT[name] and isinstance(value, type(_RULING_OUT[name])):
            continue
        return f"it asks for {name}"
    if is_chat:
        return "" if _is_text_alone(body.get("messages")) else "its messages hold more than text"
    return "" if _is_one_prompt(body.get("prompt")) else "it has several prompts"


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return len(prompt) == 1 or all(isinstance(token, int) for token in prompt)
    return isinstance(prompt, str)


def _is_text_alone(messages: object) -> bool:
    """Whether token ids stand for the whole prompt. Those of an image stand for nothing."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts)


def _number(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise


# -- what came

DONE = b"[DONE]"
EVENT_END = b"\n\n"
DONE_EVENT = b"data: " + DONE + EVENT_END
_DATA = b"data:"

Chunk = dict[str, Any]


class CannotResumeError(Exception):
    """Why a stream cannot go on, as the end of a sentence."""


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """So many tokens have exactly so many characters of text."""

    tokens: int
    characters: int


START = StreamPosition(tokens=0, characters=0)


def datas(raw: bytes) -> Iterator[bytes]:
    """What the whole events in these bytes hold."""
    for event in raw.split(EVENT_END)[:-1]:
        if event.startswith(_DATA):
            yield event[len(_DATA) :].strip()


class Received:
    """What came of one answer, over all engines that had a part in it."""

    def __init__(self, request: StreamRequest) -> None:
        self._request = request
        self.chunks: list[Chunk] = []
        self.prompt_ids: list[int] | None = None
        self.ids: list[int] = []
        self.text = ""
        self.finished: set[int] = set()
        self.has_usage = False
        self.obstacle = request.obstacle
        self.roles: set[int] = set()
        self._places = [START]
        self._began_at = START  # the part of the present engine
        self._characters = 0  # that it has sent, shown or not
        self._again_text = ""  # what the user has of the tokens that it makes again
        self._again_ids: list[int] = []
        self._unseen = ""

    @property
    def is_begun(self) -> bool:
        """Whether the user has anything of the answer itself."""
        return bool(self.ids or self.text) or any(map(_has_answer, self.chunks))

    @property
    def head(self) -> Mapping[str, Any]:
        """What all chunks of the stream have in common."""
        first = self.chunks[0] if self.chunks else {}
        return {name: first[name] for name in ("id", "object", "created", "model") if name in first}

    @property
    def usage(self) -> dict[str, int]:
        prompt, answer = len(self.prompt_ids or ()), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def add(self, chunk: Chunk) -> Chunk:
        """Count a chunk of the answer, from whichever engine. Returns it without what the user has already.

        Raises CannotResumeError if tokens that were made again came out otherwise.
        """
        self.has_usage = self.has_usage or bool(chunk.get("usage") and not chunk.get("choices"))
        self._take_prompt(chunk)
        for choice in chunk.get("choices") or ():
            self._add_choice(choice)
        self.chunks.append(chunk)
        return chunk

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if "role" in delta:
                self.roles.add(choice.get("index", 0))
            if odd := [name for name, value in delta.items() if value and name not in ("role", "content")]:
                self.obstacle = self.obstacle or f"it had begun with {odd[0]}"
        self._take_prompt(choice)
        if choice.get("finish_reason"):
            self.finished.add(choice.get("index", 0))
        if choice.get("index", 0):
            return
        text, ids = text_of(choice), choice.get("token_ids")
        if text and not ids and not choice.get("finish_reason"):
            self.obstacle = self.obstacle or "the engine sent no token ids"
        self._count(text, ids or [])
        shown_text, shown_ids = self._without_repeated(text, ids or [])
        shown_text, self._unseen = self._unseen + shown_text, ""
        self.text += shown_text
        if shown_text != text:
            _set_text(choice, shown_text)
        if ids:
            choice["token_ids"] = shown_ids

    def _take_prompt(self, holder: dict[str, Any]) -> None:
        """Only the first engine's prompt is the user's own; a continuation's holds a part of the answer."""
        if self.prompt_ids is None:
            self.prompt_ids = holder.get("prompt_token_ids")
        else:
            holder.pop("prompt_token_ids", None)

    def _count(self, text: str, ids: list[int]) -> None:
        self.ids += ids
        self._characters += len(text)
        # One token, and its text came: no part of a character is waiting. Of several tokens that is not known.
        if text and len(ids) == 1:
            characters = self._began_at.characters + self._characters + self._request.held_back
            self._places.append(StreamPosition(tokens=len(self.ids), characters=characters))

    def _without_repeated(self, text: str, ids: list[int]) -> tuple[str, list[int]]:
        again_text, again_ids = self._again_text, self._again_ids
        if not again_text and not again_ids:
            return text, ids
        same_text, same_ids = min(len(text), len(again_text)), min(len(ids), len(again_ids))
        if text[:same_text] != again_text[:same_text] or ids[:same_ids] != again_ids[:same_ids]:
            raise CannotResumeError("another replica made other tokens of the same request")
        self._again_text, self._again_ids = again_text[same_text:], again_ids[same_ids:]
        return text[same_text:], ids[same_ids:]

    def find_place(self) -> StreamPosition | None:
        """The last known place from which the answer can go on; None where it must be looked for in tokens' text."""
        if self._request.is_exact:
            return self.place_before(len(self.text) - self._request.overlap)
        # Sampled tokens come out otherwise, so none may be made again whose text was shown.
        place = self.place_before(len(self.text))
        is_at_end = place.characters == len(self.text) and not self.may_stop_within(self.text)
        return place if is_at_end else None

    def may_stop_within(self, text: str) -> bool:
        """Whether a stop string may have begun at the end of a text. Who goes on from there would not see it."""
        return any(text.endswith(stop[:length]) for stop in self._request.stops for length in range(1, len(stop)))

    def place_before(self, characters: int) -> StreamPosition:
        """The last place that is known within so many characters."""
        return next((place for place in reversed(self._places) if place.characters <= characters), START)

    def go_on_from(self, place: StreamPosition, *, unseen: str = "") -> int:
        """Another engine goes on from that place; how many tokens stand. `unseen`: text before it, held back so far."""
        self._unseen = unseen
        self._again_text, self._again_ids = self.text[place.characters :], [*self.ids[place.tokens :], *self._again_ids]
        if not self._request.is_exact:
            self._again_text, self._again_ids = "", []
        standing = place.tokens + len(self._again_ids)
        del self.ids[place.tokens :]
        self._places = [known for known in self._places if known.tokens <= place.tokens]
        self._began_at, self._characters = place, 0
        return standing


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a chunk's choice, of a chat or a completion."""
    text = choice["delta"].get("content") if isinstance(choice.get("delta"), dict) else choice.get("text")
    return text or ""


def _set_text(choice: dict[str, Any], text: str) -> None:
    if isinstance(choice.get("delta"), dict):
        choice["delta"]["content"] = text
    else:
        choice["text"] = text


def _has_answer(chunk: Chunk) -> bool:
    """Whether a chunk holds more than a role."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if text_of(choice) or choice.get("token_ids") or choice.get("finish_reason") or choice.get("logprobs"):
            return True
        if any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def event(chunk: Chunk) -> bytes:
    """A chunk as the stream carries it."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + EVENT_END
