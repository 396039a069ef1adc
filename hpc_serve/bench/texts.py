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
_USUAL_LETTERS = 5.5  # of a token
_FILLERS = (".", " a", "a")


class EngineTexts:
    """The tokenizer of a service's engines."""

    def __init__(self, service: BenchService) -> None:
        self._service = service
        self._letters_per_token = _USUAL_LETTERS

    async def vocabulary(self) -> list[int]:
        """Ids of the tokens of common words, without special ones."""
        return sorted(set(await self._tokens(prompt=" " + " ".join(WORDS), add_special_tokens=False)))

    async def count(self, text: str) -> int:
        """Tokens of a prompt."""
        return len(await self._tokens(prompt=text))

    async def chat_of(self, length: int, chance: random.Random) -> list[dict[str, Any]]:
        """A question of words by chance that has so many tokens as a chat, or as near to that as its words allow.

        The tokens that the chat template adds count.
        """
        words = " ".join(chance.choices(WORDS, k=length + 64))

        async def count(text: str) -> int:
            return len(await self._tokens(messages=_question(text), add_generation_prompt=True))

        text = await fit(words, length, count, first=round(length * self._letters_per_token))
        self._letters_per_token = len(text) / length
        return _question(text)

    async def _tokens(self, **asked: Any) -> list[int]:
        answer = await self._service.ask("/tokenize", {"model": self._service.model, **asked})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise BenchError(
                f"{self._service.name} answered /tokenize without tokens: prompts of a given length need it."
            )
        return tokens


async def fit(text: str, length: int, count: Callable[[str], Awaitable[int]], *, first: int) -> str:
    """Return the beginning of a text that has `length` tokens by `count`, or the nearest that is shorter.

    It begins with `first` letters, and goes on by what they had too much or too little. Where no cut is exact, fillers
    are tried.
    """
    most_below, least_above = 0, len(text) + 1
    letters = min(max(first, 1), len(text))
    for _ in range(_MOST_STEPS):
        got = await count(text[:letters])
        if got == length:
            return text[:letters]
        if got < length:
            most_below = max(most_below, letters)
        else:
            least_above = min(least_above, letters)
        if least_above - most_below <= 1:
            break
        step = round((length - got) * letters / max(got, 1)) or (1 if got < length else -1)
        letters = min(max(letters + step, most_below + 1), least_above - 1)
    text = text[:most_below]
    for filler in _FILLERS:
        if await count(text + filler) == length:
            return text + filler
    return text


def _question(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
