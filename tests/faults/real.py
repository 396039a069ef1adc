"""The same with real vLLM, in depth: two tiny engines on this machine's CPUs, started once, and greedy streams of them.

Each fault meets eight streams that have begun, in threads and in an event loop. Each is compared with the unbroken one:
text, token ids, finish reason and usage. The last faults leave one replica, and none.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from hpc_serve.client import connect, connect_async
from hpc_serve.errors import HpcServeError
from tests.cluster import wait_for
from tests.faults.outcomes import Outcome
from tests.support.real_replicas import BEGUN, NAME, START_S, Answer, Replicas, ask, is_server, stream

STREAMS = 8
STREAM_S = 900.0
LAUNCHER = ("-m", "hpc_serve.job")


@dataclass(frozen=True, kw_only=True)
class RealFault:
    """What happens to the replicas while streams are under way, and what mends it once they have ended."""

    name: str
    happens: Callable[[Replicas], object]
    mends: Callable[[Replicas], object] = lambda replicas: None
    ready_after: int = 2


def run_real(folder: Path, *, only: Sequence[str], on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Every fault of real engines, or those named; one after the other with the same two replicas."""
    outcomes = []
    with closing(Replicas(folder)) as replicas:
        for _ in range(2):  # an engine that is stopped for long, hung or killed is started again each time
            replicas.start("--engine-restarts", "20")
        client = connect(NAME, home=replicas.home, wait=START_S)
        _wait_until_ready(client, 2)
        unbroken = _unbroken(client)
        for fault in REAL_FAULTS:
            if only and fault.name not in only:
                continue
            try:
                outcome = _measure(fault, replicas, client, unbroken)
            except Exception:
                outcome = Outcome(fault=fault.name, sent=0, broken=traceback.format_exc())
            outcomes.append(outcome)
            on_outcome(outcome)
            if outcome.broken:
                break
    return outcomes


def _unbroken(client: Any) -> list[Answer]:
    with ThreadPoolExecutor(STREAMS) as threads:
        return list(threads.map(lambda number: stream(client, ask(number), Answer()), range(STREAMS)))


def _measure(fault: RealFault, replicas: Replicas, client: Any, unbroken: Sequence[Answer]) -> Outcome:
    begun = [threading.Event() for _ in range(STREAMS)]
    answers = [Answer() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        streams: list[Future[object]] = [
            threads.submit(_ask, client, replicas, number, answers[number], begun[number]) for number in range(STREAMS)
        ]
        assert all(each.wait(STREAM_S) for each in begun), "a stream has not begun"
        fault.happens(replicas)
        errors = [each.exception(STREAM_S) for each in streams]
    fault.mends(replicas)
    ready = _wait_until_ready(client, fault.ready_after)
    right = [
        error is None and answer.error is None and answer.substance == whole.substance
        for error, answer, whole in zip(errors, answers, unbroken, strict=True)
    ]
    resumed = sum(is_right and bool(answer.marks) for is_right, answer in zip(right, answers, strict=True))
    typed = [isinstance(error, openai.OpenAIError | HpcServeError) for error in errors]
    reported = sum(typed) + sum(answer.error is not None for answer in answers)
    return Outcome(
        fault=fault.name,
        sent=STREAMS,
        answered=sum(right) - resumed,
        resumed=resumed,
        reported=reported,
        needless=reported,
        lost=STREAMS - sum(right) - reported,
        gap_s=max(answer.gap_s for answer in answers),
        ready=ready,
        ready_due=fault.ready_after,
    )


def _ask(client: Any, replicas: Replicas, number: int, answer: Answer, begun: threading.Event) -> None:
    if number < STREAMS // 2:
        stream(client, ask(number), answer, begun)
    else:
        asyncio.run(_ask_in_loop(replicas, ask(number), answer, begun))


async def _ask_in_loop(replicas: Replicas, asked: dict[str, Any], answer: Answer, begun: threading.Event) -> None:
    client = await connect_async(NAME, home=replicas.home, wait=START_S)
    async with client:
        api = client.completions if "prompt" in asked else client.chat.completions
        count = 0
        async for chunk in await api.create(model=client.model, **asked):
            answer.add(chunk)
            count += 1
            if count == BEGUN:
                begun.set()


def _wait_until_ready(client: Any, due: int) -> int:
    """How many replicas are ready once there are so many."""

    def ready() -> int:
        with suppress(HpcServeError):
            return len(client._watch.refresh().ready)
        return 0

    with suppress(TimeoutError):
        wait_for(lambda: ready() == due, START_S, what=f"{due} replicas", step_s=1.0)
    return ready()


def _is_core(argv: tuple[str, ...]) -> bool:
    return bool(argv) and argv[0].startswith("VLLM::EngineCore")


def _is_launcher(argv: tuple[str, ...]) -> bool:
    return argv[1:3] == LAUNCHER


REAL_FAULTS = (
    RealFault(name="nothing", happens=lambda replicas: None),
    RealFault(
        name="engine-stopped",
        happens=lambda replicas: replicas.signal(replicas.jobs[0], is_server, signal.SIGSTOP),
        mends=lambda replicas: replicas.signal(replicas.jobs[0], is_server, signal.SIGCONT),
    ),
    RealFault(  # /health goes on answering 200
        name="engine-hung",
        happens=lambda replicas: replicas.signal(replicas.jobs[0], _is_core, signal.SIGSTOP),
        mends=lambda replicas: replicas.signal(replicas.jobs[0], _is_core, signal.SIGCONT),
    ),
    RealFault(name="engine-killed", happens=lambda replicas: replicas.kill_engine(replicas.jobs[0])),
    RealFault(
        name="launcher-killed",
        happens=lambda replicas: replicas.signal(replicas.jobs[0], _is_launcher, signal.SIGKILL),
        ready_after=1,
    ),
    # The only one that is left, which drains.
    RealFault(name="stop", happens=lambda replicas: replicas.hpc_serve("stop", NAME), ready_after=0),
)
