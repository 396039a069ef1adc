"""The requests that a replica gets, and the figures that tell how fast they are answered.

steady.py and burst.py each have a formula for one way in which requests arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.option_values import at_least_one
from hpc_serve.plan.speed.step import StepTime


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests that one replica gets: tokens in and out of each, and how many there are.

    Steady arrivals keep `concurrency` requests in flight: when one is answered, the next one comes. In a burst
    `concurrency` requests arrive at once, and no more come. `longest_output_tokens` says that the answers of a burst
    differ in length: they have `output_tokens` on average and at most `longest_output_tokens`. None: all have the same
    length. `decode_only`: the prompts are in the cache already, and reading them takes no time. `prefix_hits` is the
    share of each prompt that is in the cache, because an earlier request began with it. `acceptance_length` is how many
    tokens a step gives a request on average, with the drafts that the model accepts (vLLM's "mean acceptance length");
    1 without speculation. Without `generates` a request is a text to embed or to score: it has one output token, which
    stands for the answer.
    """

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 1
    arrivals: Arrivals = "steady"
    longest_output_tokens: int | None = None
    decode_only: bool = False
    prefix_hits: float = 0.0
    acceptance_length: float = 1.0
    generates: bool = True

    def __post_init__(self) -> None:
        at_least_one(input_tokens=self.input_tokens, output_tokens=self.output_tokens, concurrency=self.concurrency)
        if self.arrivals not in get_args(Arrivals):
            raise InvalidRequestError(f"arrivals is {self.arrivals!r}: use {' or '.join(get_args(Arrivals))}.")
        if self.decode_only and self.arrivals == "burst":
            raise InvalidRequestError(
                "decoding alone has no arrivals, since prompts are read elsewhere: leave out --requests or "
                "--arrivals burst, or --decode-only."
            )
        if not 0 <= self.prefix_hits < 1 or (self.prefix_hits and self.decode_only):
            raise InvalidRequestError(
                f"prefix_hits is {self.prefix_hits:g}: it must be a share from 0 to less than 1, without --decode-only."
            )
        if not self.acceptance_length >= 1:
            raise InvalidRequestError(f"acceptance_length is {self.acceptance_length:g}: it must be at least 1.")
        longest = self.longest_output_tokens
        if longest is not None and longest < self.output_tokens:
            raise InvalidRequestError(
                f"longest_output_tokens is {longest}, but answers have {self.output_tokens} tokens on average: it "
                "must be at least that."
            )

    @property
    def read_tokens(self) -> float:
        """Tokens of a prompt that are read: one at least, from whose output the answer follows."""
        return max(1.0, self.input_tokens * (1 - self.prefix_hits))

    @property
    def cached_tokens(self) -> float:
        """Tokens of a prompt that are in the cache."""
        return self.input_tokens - self.read_tokens

    @property
    def output_steps(self) -> float:
        """Steps that generate an answer, on average: one at least."""
        return max(1.0, self.output_tokens / self.acceptance_length)

    @property
    def mean_context(self) -> float:
        """Tokens before a generated token, on average."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The figures of one column, ideal or expected. Times are of one request in seconds, rates of one replica.

    `step` generates a token for each running request. `causes` are shares of all the time, prompts included. `queue_s`
    is the wait until a request may run. `ttft_s` includes it, and the rest of the step that is running. `tpot_s`
    includes the prompts of other requests in between.
    """

    step: StepTime
    causes: dict[str, float]
    queue_s: float
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float

    @property
    def bound(self) -> str:
        """The cause of most of the time, prompts included."""
        return max(self.causes, key=lambda cause: self.causes[cause])
