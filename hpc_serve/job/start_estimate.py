"""How much longer a start takes, by what the last one took and how this one goes compared to it. Pure arithmetic.

A stage that is twice as slow so far is expected to be so to its end. `expected_pace` decides what that says about the
stages after it. Where a start is, and what was seen of it, is decided in `start_stages`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# So much of the last start counts beside what was seen of this one, so that a first short step decides nothing.
_TRUSTED_S = 1.0
_TRUSTED_STEPS = 0.5
_LEAST_COMPARED_S = 1.0
_MOST_PACE = 10.0
# A step that takes longer than it should is expected to take this part of its time so far once more.
_OVERDUE = 0.2


def rest_of_load(
    *,
    position: float,
    following: float,
    lately: float,
    lately_s: float,
    waited_s: float,
    step_s: float,
    past_s: float | None,
) -> float | None:
    """Seconds left of a load whose part `position`, from 0 to 1, was reached `waited_s` seconds ago.

    Of it, `lately` came within the last `lately_s` seconds before that. The part `following` is not reached yet;
    where it is `position` itself, what comes next is due `step_s` seconds after the last. `past_s` is what all of it
    took last time: it counts beside the first files, the less the more is loaded, and from half of it on no more. None
    without one, and nothing is known before anything is loaded.

    >>> rest_of_load(position=0.2, following=0.3, lately=0.2, lately_s=8.0, waited_s=1.0, step_s=4.0, past_s=None)
    31.0
    """
    if position >= 1:
        return 0.0
    step = following - position
    trusted = 0.0 if past_s is None else _TRUSTED_STEPS * step * max(0.0, 1 - 2 * position)
    if lately + trusted == 0:
        return None
    seen_s = (lately_s + trusted * (past_s or 0.0)) / (lately + trusted)
    due_s = seen_s * step if step else step_s
    if waited_s <= due_s:
        return seen_s * (1 - position) - (waited_s if step else 0.0)
    overdue_s = (lately_s + waited_s - (0.0 if step else step_s)) / max(lately + step, 1e-9)
    return max(seen_s, overdue_s) * (1 - following) + _OVERDUE * waited_s * (step > 0)


def rest_of_stage(
    *,
    past_s: float,
    position_s: float,
    following_s: float,
    reached_s: float,
    elapsed_s: float,
    pace: float,
    pace_lasts: bool = True,
) -> float:
    """Seconds left of a stage that took `past_s` seconds last time.

    The latest mark that both starts have was seen `position_s` seconds after the stage's begin last time, and
    `reached_s` this time; the mark that comes next, after `following_s` last time. Without marks they are 0, 0 and
    `past_s`. `pace` is how much longer than last time it is expected to take until marks tell. Without `pace_lasts`
    this start and the last one differ in what is read from a disk: only the first program that imports a file waits for
    it, so how long it took counts by half for what is to come, as a power.

    >>> rest_of_stage(past_s=30.0, position_s=10.0, following_s=20.0, reached_s=20.0, elapsed_s=22.0, pace=2.0)
    38.0
    """
    seen = (reached_s + _TRUSTED_S * pace) / (position_s + _TRUSTED_S)
    if not pace_lasts:
        later, since_s = expected_pace([seen]), elapsed_s - reached_s
        step_s = later * (following_s - position_s)
        rest_of_step = step_s - since_s if since_s <= step_s else _OVERDUE * since_s
        return rest_of_step + later * (past_s - following_s)
    return _rest(position_s, following_s, past_s, reached_s=reached_s, elapsed_s=elapsed_s, pace=seen)


def expected_weights_s(
    starts: Sequence[tuple[float, int | None]], *, size: int | None, cached_part: float | None
) -> float:
    """How long the weights take, by earlier `starts`, the likest first: seconds, and bytes that came from a disk.

    `cached_part` of their `size` is in the page cache. Where that, or what came from a disk, is not known, it takes as
    long as the likest; so too where all of them came from the page cache, and these do not.

    >>> expected_weights_s([(2.0, 0), (60.0, 10 << 30)], size=10 << 30, cached_part=0.5)
    32.0
    """
    likest = starts[0][0] if starts else 0.0
    if size is None or cached_part is None:
        return likest
    cached_s = min((seconds for seconds, disk in starts if disk is not None and disk < size / 10), default=0.0)
    from_disk = next(((seconds, disk) for seconds, disk in starts if disk is not None and disk >= size / 10), None)
    if from_disk is None:
        return likest
    seconds, disk = from_disk
    return cached_s + seconds * min(1.0, (1 - cached_part) * size / disk)


def expected_pace(ratios: Sequence[float]) -> float:
    """How much longer than last time the next stage takes, by the `ratios` of those before it.

    One slow stage may have a cause of its own (a cold file system under Python's imports), so it counts by half, as a
    power. What several agree on counts whole: the least of it.

    >>> expected_pace([4.0]), expected_pace([3.0, 2.0]), expected_pace([3.0, 0.5])
    (2.0, 2.0, 1.0)
    """
    bounded = [min(max(ratio, 1 / _MOST_PACE), _MOST_PACE) for ratio in ratios]
    if len(bounded) == 1:
        return math.sqrt(bounded[0])
    if bounded and min(bounded) > 1:
        return min(bounded)
    return max(bounded) if bounded and max(bounded) < 1 else 1.0


def ratios_of(took_s: Mapping[str, float], past_s: Mapping[str, float]) -> list[float]:
    """How much longer than last time each stage took that is long enough to compare."""
    return [took_s[name] / past_s[name] for name in took_s if past_s.get(name, 0.0) >= _LEAST_COMPARED_S]


def _rest(position: float, following: float, total: float, *, reached_s: float, elapsed_s: float, pace: float) -> float:
    """Seconds from now to `total`. `position` was reached after `reached_s`; what is `following` is not reached yet.

    That it is not bounds the pace from below.
    """
    since_s = elapsed_s - reached_s
    is_overdue = since_s > pace * (following - position)
    least = max(pace, min(elapsed_s / following, _MOST_PACE)) if following > 0 else pace
    rest = max(least * (total - position) - since_s, least * (total - following))
    return max(rest, _OVERDUE * since_s if is_overdue else 0.0)
