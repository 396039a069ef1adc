"""Reads vLLM's report line: every ten seconds, what an engine did since the last line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_N = r"(\d{1,12}(?:\.\d{1,12})?)"
_REPORT = re.compile(
    rf"Avg prompt throughput: {_N} tokens/s, Avg generation throughput: {_N} tokens/s"
    rf".*?Running: (\d{{1,9}}) reqs?(?:.*?Waiting: (\d{{1,9}}) reqs?)?(?:.*?KV cache usage: {_N}%)?"
)
_IDLE_TOKENS_PER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Tokens a second since the last report; requests at this moment; the share of the cache in use, if it is said."""

    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    running: int
    waiting: int
    cache_use: float | None = None

    @property
    def does_next_to_nothing(self) -> bool:
        """Whether no request runs or waits, and hardly a token came or went."""
        tokens_per_s = max(self.prompt_tokens_per_s, self.generation_tokens_per_s)
        return not (self.running or self.waiting) and tokens_per_s <= _IDLE_TOKENS_PER_S

    def plus(self, other: EngineReport | None) -> EngineReport:
        """Add the report of another part of the engine, made at the same moment."""
        if other is None:
            return self
        uses = [use for use in (self.cache_use, other.cache_use) if use is not None]
        return EngineReport(
            prompt_tokens_per_s=self.prompt_tokens_per_s + other.prompt_tokens_per_s,
            generation_tokens_per_s=self.generation_tokens_per_s + other.generation_tokens_per_s,
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            cache_use=max(uses, default=None),
        )


def read_report(line: str) -> EngineReport | None:
    """Return the report in `line`, or None.

    >>> read_report("Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 9.5 tokens/s, Running: 2 reqs, "
    ...     "Waiting: 1 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%").cache_use
    0.125
    """
    if (found := _REPORT.search(line)) is None:
        return None
    prompt, generation, running, waiting, cache_use = found.groups()
    return EngineReport(
        prompt_tokens_per_s=float(prompt),
        generation_tokens_per_s=float(generation),
        running=int(running),
        waiting=int(waiting or 0),
        cache_use=float(cache_use) / 100 if cache_use else None,
    )
