"""Which streams of answers may go on at another replica, read from a request's body. Pure.

A stream goes on from token ids, so the engine is asked for them (`return_token_ids`), unless the request asks for what
a continuation cannot give: several answers, probabilities, tool calls, a grammar. Fields are those of vLLM's protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
