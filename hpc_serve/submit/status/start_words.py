"""The words for people about a replica that starts: its stage, its loading speed, when it is ready. Pure.

Its head decides how far the start is, and how long it takes (`job/progress/start_stages.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_serve.durations import SOON_S, about, duration
from hpc_serve.sizes import GIB, MIB

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus

# Stages whose names are not words for people.
_WORDS = {"capture": "KV cache and graphs", "server": "first answer"}
_LEAST_SHOWN_S = 1.0
_FIRST_REPEAT_S = 60.0
_PARTS_TOLD = 4


def progress_words(status: ReplicaStatus) -> str:
    """Return how fast a start loads and when it is ready; "" for a replica that does not start.

    "1.2 GiB/s, ready in about 3 min", "weights loaded in about 2 min, time left not known".
    """
    start = status.start
    if status.state != "starting" or start is None or not start.stage:
        return ""
    loads = start.stage == "weights"
    rate = _rate(start.bytes_per_s) if (loads or start.stage == "staging") and start.bytes_per_s else ""
    if start.time_left_s is not None:
        left = f"ready in {about(start.time_left_s - status.record_age_s)}"
    elif loads and start.weights_left_s is not None:
        left = f"weights loaded in {about(start.weights_left_s - status.record_age_s)}, time left not known"
    else:
        left = "time left not known"
    return ", ".join(words for words in (rate, left) if words)


def detail_words(status: ReplicaStatus) -> str:
    """Return the detail of a status with what is known of the progress of its start."""
    progress = progress_words(status)
    return f"{status.detail}, {progress}" if progress and status.detail and not status.reason else status.detail


def stage_seconds(status: ReplicaStatus) -> dict[str, float]:
    """Return the seconds of each stage of a start, in order: the queue, the finished stages, the present stage."""
    start = status.start
    if start is None:
        return {}
    took = {_WORDS.get(name, name): seconds for name, seconds in start.took_s.items()}
    if status.submitted_at and status.started_at:
        took = {"queued": max(0.0, status.started_at - status.submitted_at), **took}
    if start.stage and status.updated_at:
        until = status.updated_at + (status.record_age_s if status.state == "starting" else 0.0)
        took[_WORDS.get(start.stage, start.stage)] = max(0.0, until - start.since)
    return took


def stages_words(status: ReplicaStatus) -> str:
    """Return the finished stages of a start and the present stage, with their times; "" if there is none to tell.

    "queued 12 s, engine 31 s, weights 1 min 5 s (14.9 GiB, 235 MiB/s), compile for 20 s"
    """
    start = status.start
    if start is None:
        return ""
    present = _WORDS.get(start.stage, start.stage)
    words = []
    for name, seconds in stage_seconds(status).items():
        if name == present:
            words += [f"{name} for {duration(seconds)}"] if status.state == "starting" else []
        elif seconds >= _LEAST_SHOWN_S:
            words.append(f"{name} {duration(seconds)}{_loaded(status) if name == 'weights' else ''}")
    return ", ".join(words)


class CoarseChanges:
    """Decides whether a replica's status has changed enough to be told again.

    Enough is another stage, another quarter of the count, half of the time left, or twice the time in a stage.
    """

    def __init__(self) -> None:
        self._told: tuple[object, ...] | None = None
        self._told_left_s = math.inf
        self._repeat_after_s = _FIRST_REPEAT_S

    def is_one(self, status: ReplicaStatus) -> bool:
        """Return whether the status is to be told. Later changes count from the told status."""
        stage = (status.name, status.restart, status.state, status.stage, status.reason, _quarter(status))
        start, is_new = status.start, stage != self._told
        if start is not None and start.stage and status.state == "starting":
            left_s = math.inf if start.time_left_s is None else max(start.time_left_s, SOON_S)
            in_stage_s = (status.updated_at or 0.0) - start.since
            is_halved = left_s < math.inf and 2 * left_s <= self._told_left_s
            if is_new or is_halved or in_stage_s >= self._repeat_after_s:
                is_new, self._told_left_s = True, left_s
                self._repeat_after_s = max(_FIRST_REPEAT_S, 2 * in_stage_s)
        self._told = stage
        return is_new


def _quarter(status: ReplicaStatus) -> int:
    progress = status.progress
    if progress is None or not progress.total:
        return 0
    return min(_PARTS_TOLD * progress.done // progress.total, _PARTS_TOLD - 1)


def _loaded(status: ReplicaStatus) -> str:
    start = status.start
    if start is None or not start.bytes_per_s:
        return ""
    size = f"{start.checkpoint_bytes / GIB:.1f} GiB, " if start.checkpoint_bytes else ""
    return f" ({size}{_rate(start.bytes_per_s)})"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= GIB:
        return f"{bytes_per_s / GIB:.1f} GiB/s"
    return f"{bytes_per_s / MIB:.0f} MiB/s"
