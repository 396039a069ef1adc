"""The points of a plan's curves: how fast a layout is over the requests that run at once, for several contexts.

figure.py and page.py decide how they are drawn. Pure: the figures are those of plan/speed/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.speed.estimate import SpeedEstimate, estimate_speed, held_at_once, requests_held
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.traffic import Traffic

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult

CONTEXTS = (1024, 4096, 16384, 65536)
_PER_OCTAVE = 4


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is drawn: one layout with its memory, under traffic that arrives so. `is_ideal`: the roofline alone."""

    roofline: Roofline
    memory: MemoryEstimate
    traffic: Traffic
    max_model_len: int
    is_ideal: bool = False

    @property
    def formula(self) -> str:
        """The formula of the curves, in a few words."""
        if self.traffic.decode_only:
            return "decoding alone"
        return "steady arrivals" if self.traffic.arrivals == "steady" else "all requests at once"

    def held(self, input_tokens: int) -> int:
        """Return the most requests with such prompts that run at once."""
        traffic = replace(self.traffic, input_tokens=input_tokens)
        return held_at_once(self.roofline, traffic, self.memory)

    def limit(self) -> str:
        """Why no more requests run at once."""
        if requests_held(self.roofline, self.traffic, self.memory) >= self.roofline.max_num_seqs:
            return f"--max-num-seqs {self.roofline.max_num_seqs:,}, not the cache"
        return "as many as the cache holds"

    def at(self, input_tokens: int, batch: int) -> SpeedEstimate:
        """Return the speed with so many requests in flight."""
        traffic = replace(self.traffic, input_tokens=input_tokens, concurrency=batch)
        return estimate_speed(self.roofline, traffic, self.memory, is_ideal=self.is_ideal)

    def contexts(self, usual: Sequence[int] = CONTEXTS, most: int = len(CONTEXTS)) -> list[int]:
        """Return the lengths of prompt to draw: the length asked for, and usual lengths that leave room for the
        answer."""
        longest, asked = self.max_model_len - self.traffic.output_tokens, self.traffic.input_tokens
        others = [length for length in usual if length <= longest and length != asked]
        return sorted([asked, *others[: most - 1]])


def drawn_of(result: PlanResult, layout: Layout, memory: MemoryEstimate) -> Drawn:
    """Return a layout of a plan under the traffic asked for.

    Raises InvalidRequestError where the speed is not known.
    """
    inputs = result.inputs
    if result.model.encoder_positions:
        raise InvalidRequestError(
            "There is no picture: the speed is not planned for models that attend to an encoder of sound."
        )
    engine = replace(inputs.engine_for(layout), max_num_seqs=memory.max_num_seqs)
    return Drawn(
        roofline=Roofline(result.model, result.accelerator, engine, layout, result.measured),
        memory=memory,
        traffic=result.traffic,
        max_model_len=inputs.max_model_len,
        is_ideal=result.ideal,
    )


def batches(held: int, per_octave: int = _PER_OCTAVE) -> list[int]:
    """Return the batches to draw: so many an octave, up to the most that the cache holds."""
    steps = {round(2 ** (part / per_octave)) for part in range(15 * per_octave)}
    return sorted({1, held, *(step for step in steps if 1 <= step <= held)})
