"""Makes the requests of a run: prompts by chance or of a file. The same seed gives the same requests.

Prompts of completions are ids of ordinary tokens, so that their lengths are exact without a tokenizer here. A chat is
text. Only an engine's tokenizer knows how long a text is and which ids are of ordinary tokens: the engine is asked.

Files of requests are read by the names and in the formats of `vllm bench serve`: custom and sharegpt. A sample without
a number of tokens to answer has the text of an answer; the engine counts its tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from hpc_serve.bench.run import BenchRequest, Dataset, Lengths
from hpc_serve.bench.service import BenchError, BenchService
from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import parse_json

T = TypeVar("T")
S = TypeVar("S")

# -- files of requests

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
    for number, line in enumerate(text.split("\n"), start=1):  # texts of JSON may hold U+2028 and U+0085
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        value = _json(line, where)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{where} is no JSON object: {_NOT}")
        prompt, messages, output_len = (value.get(name) for name in ("prompt", "messages", "output_tokens"))
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)
        is_chat = isinstance(messages, list) and bool(messages) and all(isinstance(one, dict) for one in messages)
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


# -- what only an engine knows

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


# -- requests

_AT_ONCE = 16  # questions to the tokenizer
_USUAL_ANSWER = 256
_LEAST_VOCABULARY = 16
# Conversations that `vllm bench serve` takes of ShareGPT: prompts, answers and both of so many tokens.
_LEAST, _MOST_PROMPT, _MOST_BOTH = 4, 1024, 2048


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
    except OSError as error:
        raise InvalidRequestError(f"--dataset-path {workload.path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"--dataset-path {workload.path} is not in UTF-8. Write the file in UTF-8, and do not compress it."
        ) from None
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
