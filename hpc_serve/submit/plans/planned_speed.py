"""The speed that a plan expects of a replica, as figures that a job carries, and what they say of a number of requests.

Pure. How fast a layout is, is decided in plan/speed; what is measured, by the engine's metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_serve.plan.speed.estimate import SpeedEstimate

_PREFIX = "output_tokens_per_s_at_"
_COUNT = re.compile(_PREFIX + r"([1-9][0-9]{0,8})")
_INPUT, _OUTPUT = "request_input_tokens", "request_output_tokens"
_RUNS = "measured_runs"
ENCODER_POSITIONS = "encoder_positions"
"""Name of the figure that only a model with an encoder of sound has."""


def speed_figures(estimates: Sequence[SpeedEstimate]) -> dict[str, float]:
    """Expected output tokens a second of one replica by requests in flight, and the tokens of each request.

    Where runs that were measured here correct a figure, their number is beside them.
    """
    if not estimates or not estimates[0].traffic.generates:
        return {}
    traffic = estimates[0].traffic
    of_request = {_INPUT: traffic.input_tokens, _OUTPUT: traffic.output_tokens}
    if runs := max((one.measured.runs for one in estimates if one.measured), default=0):
        of_request[_RUNS] = runs
    return of_request | {f"{_PREFIX}{one.traffic.concurrency}": one.expected.output_tokens_per_s for one in estimates}


def planned_tokens_per_s(predicted: Mapping[str, float], in_flight: int) -> float | None:
    """Output tokens a second that the plan expects with so many requests in flight; None if it says nothing of speed.

    Between two numbers of requests it goes evenly by logarithms; beyond the largest it stays.

    >>> round(planned_tokens_per_s({"output_tokens_per_s_at_1": 100.0, "output_tokens_per_s_at_4": 400.0}, 2))
    200
    """
    known = planned_speeds(predicted)
    if not known or in_flight < 1:
        return None
    below = max((one for one in known if one[0] <= in_flight), default=known[0])
    above = min((one for one in known if one[0] >= in_flight), default=known[-1])
    if below[0] == above[0]:
        return below[1]
    share = math.log(in_flight / below[0]) / math.log(above[0] / below[0])
    return below[1] * math.exp(share * math.log(above[1] / below[1]))


def planned_speeds(predicted: Mapping[str, float]) -> list[tuple[int, float]]:
    """Numbers of requests in flight with the output tokens a second that the plan expects, in order."""
    return sorted(
        (int(found[1]), value) for name, value in predicted.items() if (found := _COUNT.fullmatch(name)) and value > 0
    )


def planned_request(predicted: Mapping[str, float]) -> tuple[int, int] | None:
    """Return the tokens in and out of the requests that the plan's speed is of."""
    if _INPUT not in predicted or _OUTPUT not in predicted:
        return None
    return int(predicted[_INPUT]), int(predicted[_OUTPUT])


def measured_runs_of(predicted: Mapping[str, float]) -> int:
    """Return how many runs that were measured here corrected the plan's speed; 0: none."""
    return int(predicted.get(_RUNS, 0))
