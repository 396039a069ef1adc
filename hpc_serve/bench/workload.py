"""Makes the requests of a run: prompts by chance or of a file. The same seed gives the same requests.

Prompts of completions are ids of ordinary tokens, so that their lengths are exact without a tokenizer here. A chat is
text, and the engine must count its length (`texts`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_serve.bench.files import Sample, choose, read_samples
from hpc_serve.bench.run import BenchRequest, Dataset, Lengths
from hpc_serve.bench.texts import EngineTexts
from hpc_serve.errors import InvalidRequestError

_AT_ONCE = 16  # questions to the tokenizer
_USUAL_ANSWER = 256
_LEAST_VOCABULARY = 16
# Conversations that `vllm bench serve` takes of ShareGPT: prompts, answers and both of so many tokens.
_LEAST, _MOST_PROMPT, _MOST_BOTH = 4, 1024, 2048

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class BenchWorkload:
    """The requests of a run. `count` None: as many as the file has. `ignore_eos`: answers have the length asked for.

    `lengths` are of requests that are made; `output_len` replaces the lengths of a file's answers.
    """

    dataset: Dataset = "random"
    count: int | None = 1000
    seed: int = 0
    lengths: Lengths | None = None
    path: Path | None = None
    output_len: int | None = None
    prefix_len: int = 256
    num_prefixes: int = 10
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the workload's name in tables."""
        return f"{self.dataset} {self.lengths}" if self.path is None else self.path.name


async def make_requests(workload: BenchWorkload, texts: EngineTexts) -> tuple[BenchRequest, ...]:
    """Return all requests of a workload. Raises InvalidRequestError, BenchError."""
    made = await (_made if workload.path is None else _from_file)(workload, texts)
    extra = {**({"ignore_eos": True} if workload.ignore_eos else {}), **workload.extra_body}
    return tuple(replace(request, body={**request.body, **extra}) for request in made)


async def _made(workload: BenchWorkload, texts: EngineTexts) -> list[BenchRequest]:
    lengths, count, seed = workload.lengths, workload.count, workload.seed
    assert lengths is not None
    assert count is not None
    if workload.dataset == "chat":

        async def question(place: int) -> BenchRequest:
            messages = await texts.chat_of(lengths.input_len, random.Random(f"chat {seed} {place}"))
            return _chat(messages, lengths.output_len, input_len=lengths.input_len)

        return await _each(question, range(count))
    vocabulary = await texts.vocabulary()
    if workload.dataset == "random":
        return completions(vocabulary, lengths, count, seed)
    if not 0 < workload.prefix_len < lengths.input_len:
        raise InvalidRequestError(
            f"A shared prefix of {workload.prefix_len} tokens is no part of prompts of {lengths.input_len}: --lengths "
            "has the tokens of the whole prompt, --prefix-len less than that."
        )
    return completions(
        vocabulary, lengths, count, seed, prefix_len=workload.prefix_len, num_prefixes=workload.num_prefixes
    )


def completions(
    vocabulary: Sequence[int], lengths: Lengths, count: int, seed: int, *, prefix_len: int = 0, num_prefixes: int = 1
) -> list[BenchRequest]:
    """Return completions in random order. Each of `num_prefixes` prefixes begins equally many of their prompts."""
    if len(vocabulary) < _LEAST_VOCABULARY:
        raise InvalidRequestError(
            f"The engine's tokenizer makes only {len(vocabulary)} different tokens of common words; prompts by chance "
            f"need {_LEAST_VOCABULARY}. Give a file of your own: --dataset-name custom --dataset-path FILE.jsonl"
        )
    chance = random.Random(f"prompts {seed}")
    prefixes = [chance.choices(vocabulary, k=prefix_len) for _ in range(num_prefixes)]
    order = [prefixes[place % num_prefixes] for place in range(count)]
    chance.shuffle(order)
    rest = lengths.input_len - prefix_len
    return [_completion(prefix + chance.choices(vocabulary, k=rest), lengths.output_len) for prefix in order]


def _completion(prompt: str | list[int], output_len: int) -> BenchRequest:
    """Return one completion. The length of a text is not known here."""
    known = len(prompt) if isinstance(prompt, list) else None
    # As `vllm bench serve` asks: a model's own settings may have a penalty, which costs time.
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": output_len, "repetition_penalty": 1.0}
    return BenchRequest(path="/v1/completions", body=body, input_len=known, output_len=output_len)


def _chat(messages: list[dict[str, Any]], output_len: int, *, input_len: int | None = None) -> BenchRequest:
    """Return one chat; `input_len` is what the engine has counted."""
    body = {"messages": messages, "max_completion_tokens": output_len}
    return BenchRequest(path="/v1/chat/completions", body=body, input_len=input_len, output_len=output_len)


async def _from_file(workload: BenchWorkload, texts: EngineTexts) -> list[BenchRequest]:
    assert workload.path is not None
    try:
        text = workload.path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--dataset-path {workload.path} cannot be read: {error}") from error
    samples = choose(read_samples(workload.dataset, text, str(workload.path)), None, workload.seed)
    if workload.dataset == "sharegpt":
        samples = await _usable(samples, workload, texts)
    chosen = choose(samples, workload.count, workload.seed)
    lengths = [workload.output_len or sample.output_len or _USUAL_ANSWER for sample in chosen]
    return [
        _chat(sample.messages, length) if sample.messages else _completion(sample.prompt or "", length)
        for sample, length in zip(chosen, lengths)
    ]


async def _usable(samples: list[Sample], workload: BenchWorkload, texts: EngineTexts) -> list[Sample]:
    """Conversations with the lengths of their answers: the first that vLLM would take, as many as are needed."""

    async def measured(sample: Sample) -> Sample | None:
        input_len, answer_len = await texts.count(str(sample.prompt)), await texts.count(sample.answer)
        output_len = workload.output_len or answer_len
        is_long = workload.output_len is not None or answer_len >= _LEAST
        fits = _LEAST <= input_len <= _MOST_PROMPT and input_len + output_len <= _MOST_BOTH
        return replace(sample, output_len=output_len) if is_long and fits else None

    found: list[Sample] = []
    for begin in range(0, len(samples), 4 * _AT_ONCE):
        found += filter(None, await _each(measured, samples[begin : begin + 4 * _AT_ONCE]))
        if workload.count is not None and len(found) >= workload.count:
            break
    if not found:
        raise InvalidRequestError(
            f"No conversation of {workload.path} can be used: a prompt must have {_LEAST} to {_MOST_PROMPT:,} tokens, "
            f"and prompt and answer {_MOST_BOTH:,} at most together. `vllm bench serve` has these limits for sharegpt."
        )
    return found


async def _each(make: Callable[[S], Awaitable[T]], values: Sequence[S]) -> list[T]:
    """Return the result of `make` for each value; some calls run at once."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(value: S) -> T:
        async with limit:
            return await make(value)

    return list(await asyncio.gather(*map(one, values)))
