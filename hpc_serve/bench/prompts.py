"""Prompts of a given length, made by chance from a seed: the same seed gives the same requests.

Prompts of completions are ids of ordinary tokens, so that their lengths are exact without a tokenizer here. A chat is
text, and the engine must count its length (`texts`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_serve.bench.outcome import BenchRequest
from hpc_serve.errors import InvalidRequestError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LEAST_VOCABULARY = 16


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each prompt and of each answer."""

    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


def parse_lengths(text: str) -> tuple[Lengths, ...]:
    """Raises InvalidRequestError.

    >>> [str(lengths) for lengths in parse_lengths("1800/128,128/1800")]
    ['1800/128', '128/1800']
    """
    found = []
    for part in text.split(","):
        input_text, _, output_text = part.strip().partition("/")
        if not (input_text.isdecimal() and output_text.isdecimal() and int(input_text) and int(output_text)):
            raise InvalidRequestError(f"{part!r} are no lengths: write tokens in/tokens out, as 1800/128,128/1800.")
        found.append(Lengths(input_len=int(input_text), output_len=int(output_text)))
    return tuple(found)


def random_requests(vocabulary: Sequence[int], lengths: Iterable[Lengths], seed: int) -> list[BenchRequest]:
    """Return a completion for each of the lengths; its prompt are tokens of the vocabulary, drawn by chance."""
    _check(vocabulary)
    chance = random.Random(f"prompts {seed}")
    return [completion(chance.choices(vocabulary, k=one.input_len), one.output_len) for one in lengths]


def shared_prefix_requests(
    vocabulary: Sequence[int], lengths: Lengths, count: int, seed: int, *, prefix_len: int, num_prefixes: int
) -> list[BenchRequest]:
    """Return completions in random order. Each of `num_prefixes` prefixes begins equally many of their prompts."""
    _check(vocabulary)
    if not 0 < prefix_len < lengths.input_len:
        raise InvalidRequestError(
            f"A shared prefix of {prefix_len} tokens is no part of prompts of {lengths.input_len}: --lengths has the "
            "tokens of the whole prompt, --prefix-len less than that."
        )
    chance = random.Random(f"prefixes {seed}")
    prefixes = [chance.choices(vocabulary, k=prefix_len) for _ in range(num_prefixes)]
    order = [place % num_prefixes for place in range(count)]
    chance.shuffle(order)
    rest = lengths.input_len - prefix_len
    made = (prefixes[which] + chance.choices(vocabulary, k=rest) for which in order)
    return [completion(prompt, lengths.output_len) for prompt in made]


def completion(prompt: str | list[int], output_len: int) -> BenchRequest:
    """Return one completion. The length of a text is not known here."""
    known = len(prompt) if isinstance(prompt, list) else None
    # As `vllm bench serve` asks: a model's own settings may have a penalty, which costs time.
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": output_len, "repetition_penalty": 1.0}
    return BenchRequest(path=COMPLETIONS, body=body, input_len=known, output_len=output_len)


def chat(messages: list[dict[str, Any]], output_len: int, *, input_len: int | None = None) -> BenchRequest:
    """Return one chat; `input_len` is what the engine has counted."""
    body = {"messages": messages, "max_completion_tokens": output_len}
    return BenchRequest(path=CHAT, body=body, input_len=input_len, output_len=output_len)


def _check(vocabulary: Sequence[int]) -> None:
    if len(vocabulary) < LEAST_VOCABULARY:
        raise InvalidRequestError(
            f"The engine's tokenizer makes only {len(vocabulary)} different tokens of common words; prompts by chance "
            f"need {LEAST_VOCABULARY}. Give a file of your own: --dataset-name custom --dataset-path FILE.jsonl"
        )
