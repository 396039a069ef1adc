"""Asks a service's engines for what only their tokenizer knows: ids of ordinary tokens, and how long a text is."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from hpc_serve.bench.service import BenchError, BenchService

WORDS = files("hpc_serve.bench").joinpath("words.txt").read_text(encoding="ascii").split()
"""Common English words. Most are one token of any tokenizer, and none is a special token."""
_MOST_STEPS = 16
_FILLERS = (" a", ".", "a", " I")


class EngineTexts:
    """The tokenizer of a service's engines."""

    def __init__(self, service: BenchService) -> None:
        self._service = service
        self._words_per_token = 1.0

    async def vocabulary(self) -> list[int]:
        """Ids of the tokens of common words, without special ones."""
        answer = await self._ask({"prompt": " " + " ".join(WORDS), "add_special_tokens": False})
        return sorted(set(answer["tokens"]))

    async def count(self, text: str) -> int:
        """Tokens of a prompt."""
        return len((await self._ask({"prompt": text}))["tokens"])

    async def count_chat(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of a chat, with what the chat template adds."""
        return len((await self._ask({"messages": messages, "add_generation_prompt": True}))["tokens"])

    async def chat_of(self, length: int, chance: random.Random) -> list[dict[str, Any]]:
        """A question of words by chance that has so many tokens as a chat, or as near to that as its words allow."""
        words = chance.choices(WORDS, k=length + 64)

        async def count(text: str) -> int:
            return await self.count_chat(_question(text))

        text, used = await fit(words, length, count, first=round(length * self._words_per_token))
        self._words_per_token = used / length
        return _question(text)

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._service.ask("/tokenize", {"model": self._service.model, **body})
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise BenchError(
                f"{self._service.name} answered /tokenize without tokens: prompts of a given length need it."
            )
        return answer


async def fit(words: list[str], length: int, count: Callable[[str], Awaitable[int]], *, first: int) -> tuple[str, int]:
    """Return the beginning of some words that has `length` tokens by `count`, and how many words that is.

    It begins with `first` words and goes on by what they had too much or too little. Single letters fill the rest that
    is shorter than a word.
    """
    most_below, least_above = 0, len(words) + 1
    number = min(max(first, 1), len(words))
    for _ in range(_MOST_STEPS):
        got = await count(" ".join(words[:number]))
        if got == length:
            return " ".join(words[:number]), number
        if got < length:
            most_below = max(most_below, number)
        else:
            least_above = min(least_above, number)
        if least_above - most_below <= 1:
            break
        step = round((length - got) * number / max(got, 1)) or (1 if got < length else -1)
        number = min(max(number + step, most_below + 1), least_above - 1)
    return await _filled(" ".join(words[:most_below]), length, count), most_below


async def _filled(text: str, length: int, count: Callable[[str], Awaitable[int]]) -> str:
    """Return a text that is a little too short, with a few more letters."""
    left = length - await count(text)
    for filler in _FILLERS:
        while left and 0 <= (then := length - await count(text + filler)) < left:
            text, left = text + filler, then
    return text


def _question(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
