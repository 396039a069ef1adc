"""The points of a plan's curves: how fast a layout is over the requests that run at once, for several contexts.

figure.py and page.py decide how they are drawn. Pure: the figures are those of plan/speed/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.choice.candidates import Candidate
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate
from hpc_serve.plan.speed.throughput import Traffic

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult


def drawn_speeds(result: PlanResult, of: Candidate | None = None) -> ReplicaSpeeds:
    """Return the speeds of a plan's layout, or of another of its candidates.

    Raises InvalidRequestError where the speed is not known.
    """
    if result.model.encoder_positions:
        raise InvalidRequestError(
            "There is no picture: the speed is not planned for models that attend to an encoder of sound."
        )
    memory = of.memory if of and of.memory else result.chosen.memory
    engine = replace(result.inputs.engine, max_num_seqs=memory.max_num_seqs)
    return result.speeds(replace(result.inputs, engine=engine), of)


def prompt_lengths(longest: int, asked: Traffic, usual: Sequence[int], most: int) -> list[int]:
    """Return the lengths of prompt to draw: the length asked for, and usual lengths that leave room for the answer in
    contexts of `longest` tokens."""
    others = [length for length in usual if length <= longest - asked.output_tokens and length != asked.input_tokens]
    return sorted([asked.input_tokens, *others[: most - 1]])


def with_prompts(speeds: ReplicaSpeeds, input_tokens: int) -> ReplicaSpeeds:
    """Return the speeds with prompts of so many tokens."""
    return replace(speeds, traffic=replace(speeds.traffic, input_tokens=input_tokens))


def curve(speeds: ReplicaSpeeds, per_octave: int = 4) -> list[SpeedEstimate]:
    """Return the speeds to draw: so many an octave, up to the most requests that run at once."""
    held = speeds.held()
    steps = {round(2 ** (part / per_octave)) for part in range(15 * per_octave)}
    return [speeds.at(count) for count in sorted({1, held, *(step for step in steps if step <= held)})]
