"""Reads files of requests, by the names and in the formats of `vllm bench serve`: custom and sharegpt.

Pure: text in, samples out. A sample without a number of tokens to answer has the text of an answer; the engine counts
its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import parse_json

FORMATS = ("custom", "sharegpt")
_NOT = 'a line has "prompt" (text or token ids) or "messages", and may have "output_tokens"'


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request of a file: a prompt (text or token ids) or messages, and the text or the length of its answer."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None
    answer: str = ""


def read_samples(name: str, text: str, source: str) -> list[Sample]:
    """Return all samples of a file. Raises InvalidRequestError: `source` and the place."""
    samples = list((_custom if name == "custom" else _sharegpt)(text, source))
    if not samples:
        raise InvalidRequestError(f"{source} holds no request that can be used as {name}.")
    return samples


def choose(samples: list[Sample], count: int | None, seed: int) -> list[Sample]:
    """Return `count` samples in random order, repeated if there are too few; all of them if `count` is None."""
    chance = random.Random(f"samples {seed}")
    shuffled = list(samples)
    chance.shuffle(shuffled)
    if count is None:
        return shuffled
    return shuffled[:count] + chance.choices(shuffled, k=max(0, count - len(shuffled)))


def _custom(text: str, source: str) -> Iterator[Sample]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        value = _json(line, where)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{where} is no JSON object: {_NOT}")
        prompt, messages, output_len = (value.get(name) for name in ("prompt", "messages", "output_tokens"))
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)
        is_chat = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        if not (isinstance(prompt, str) or is_ids) and not (prompt is None and is_chat):
            raise InvalidRequestError(f"{where} is no request: {_NOT}")
        if output_len is not None and (type(output_len) is not int or output_len < 1):
            raise InvalidRequestError(f"{where}: output_tokens is {output_len!r}, which is no number of tokens.")
        yield Sample(prompt=prompt, messages=messages, output_len=output_len)


def _sharegpt(text: str, source: str) -> Iterator[Sample]:
    value = _json(text, source)
    if not isinstance(value, list):
        raise InvalidRequestError(f"{source} is no list of conversations, as ShareGPT's files are.")
    for entry in value:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
        if isinstance(prompt, str) and isinstance(answer, str):
            yield Sample(prompt=prompt, answer=answer)


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is no JSON: {error}") from None
