"""Makes the requests of a run: what a person named, from prompts by chance or a file, with the engine's tokenizer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_serve.bench import prompts
from hpc_serve.bench.files import FORMATS, Sample, choose, read_samples
from hpc_serve.bench.outcome import BenchRequest, Dataset
from hpc_serve.bench.prompts import Lengths
from hpc_serve.bench.texts import EngineTexts
from hpc_serve.errors import InvalidRequestError

MADE = ("random", "chat", "prefix_repetition")
_AT_ONCE = 16  # questions to the tokenizer
_USUAL_ANSWER = 256
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
        if self.path is not None:
            return self.path.name
        return f"{self.dataset} {self.lengths}"


async def make_requests(workload: BenchWorkload, texts: EngineTexts) -> tuple[BenchRequest, ...]:
    """Return all requests of a workload. Raises InvalidRequestError, BenchError."""
    made = await (_from_file if workload.dataset in FORMATS else _made)(workload, texts)
    extra = {**({"ignore_eos": True} if workload.ignore_eos else {}), **workload.extra_body}
    return tuple(replace(request, body={**request.body, **extra}) for request in made)


async def _made(workload: BenchWorkload, texts: EngineTexts) -> list[BenchRequest]:
    lengths, count = workload.lengths, workload.count
    assert lengths is not None
    assert count is not None
    if workload.dataset == "chat":
        chances = [random.Random(f"chat {workload.seed} {place}") for place in range(count)]

        async def question(chance: random.Random) -> BenchRequest:
            messages = await texts.chat_of(lengths.input_len, chance)
            return prompts.chat(messages, lengths.output_len, input_len=lengths.input_len)

        first = [await question(chance) for chance in chances[:1]]  # the others begin with what it needed
        return first + await _each(question, chances[1:])
    vocabulary = await texts.vocabulary()
    if workload.dataset == "random":
        return prompts.random_requests(vocabulary, [lengths] * count, workload.seed)
    return prompts.shared_prefix_requests(
        vocabulary,
        lengths,
        count,
        workload.seed,
        prefix_len=workload.prefix_len,
        num_prefixes=workload.num_prefixes,
    )


async def _from_file(workload: BenchWorkload, texts: EngineTexts) -> list[BenchRequest]:
    assert workload.path is not None
    try:
        text = workload.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--dataset-path {workload.path} cannot be read: {error}") from error
    samples = choose(read_samples(workload.dataset, text, str(workload.path)), None, workload.seed)
    if workload.dataset == "sharegpt":
        samples = await _usable(samples, workload, texts)
    samples = choose(samples, workload.count, workload.seed)
    if workload.dataset == "burstgpt":
        lengths = [
            Lengths(input_len=one.input_len or 1, output_len=workload.output_len or one.output_len or 1)
            for one in samples
        ]
        return prompts.random_requests(await texts.vocabulary(), lengths, workload.seed)
    return [_request(sample, workload) for sample in samples]


async def _usable(samples: list[Sample], workload: BenchWorkload, texts: EngineTexts) -> list[Sample]:
    """Conversations with their lengths: the first that vLLM would take, as many as are needed."""

    async def measured(sample: Sample) -> Sample:
        assert isinstance(sample.prompt, str)
        return replace(
            sample, input_len=await texts.count(sample.prompt), output_len=await texts.count(sample.answer or "")
        )

    found: list[Sample] = []
    for begin in range(0, len(samples), 4 * _AT_ONCE):
        some = await _each(measured, samples[begin : begin + 4 * _AT_ONCE])
        found += [sample for sample in some if _is_usable(sample, workload)]
        if workload.count is not None and len(found) >= workload.count:
            break
    if not found:
        raise InvalidRequestError(
            f"No conversation of {workload.path} can be used: a prompt must have {_LEAST} to {_MOST_PROMPT:,} tokens, "
            f"and prompt and answer {_MOST_BOTH:,} at most together. `vllm bench serve` has these limits for sharegpt."
        )
    return found


def _is_usable(sample: Sample, workload: BenchWorkload) -> bool:
    input_len, output_len = sample.input_len or 0, workload.output_len or sample.output_len or 0
    if workload.output_len is None and output_len < _LEAST:
        return False
    return _LEAST <= input_len <= _MOST_PROMPT and input_len + output_len <= _MOST_BOTH


def _request(sample: Sample, workload: BenchWorkload) -> BenchRequest:
    output_len = workload.output_len or sample.output_len or _USUAL_ANSWER
    if sample.messages is not None:
        return prompts.chat(sample.messages, output_len)
    assert sample.prompt is not None
    return prompts.completion(sample.prompt, output_len)


async def _each(make: Callable[[S], Awaitable[T]], values: Sequence[S]) -> list[T]:
    """Return the result of `make` for each value; some calls run at once."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(value: S) -> T:
        async with limit:
            return await make(value)

    return list(await asyncio.gather(*map(one, values)))
