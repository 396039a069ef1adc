"""Counts what became of the requests of one run. Pure: lines of the load and of the engines in, one `Outcome` out.

The load says whether an answer was right and when; the engines' work logs say how often a request was worked on. A
request is *answered* by one engine, *repeated* from its beginning, *resumed* by an engine that was given the beginning
of the answer, *reported* by a typed error of openai or hpc_serve, or *lost*: wrong, hung, or ended by another error.
A report is *needless* if the request could have been resumed or repeated, or was with the only engine when that was
told to end.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"Request ([0-9a-f]+-\d+): say something\.")
_BEGUN_ANSWER = re.compile(r"w\d+\.[0-9a-f]{4}$")
# A request is affected if it took this much longer than requests before the fault, the queues of full engines apart.
NOTABLE_S = 1.5
PAUSE_S = 0.3  # shorter times without a piece of a stream are not written down one by one

Line = Mapping[str, Any]
Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: counts of requests, and seconds from the fault on; None where there is nothing to tell.

    `notice_s`: until the start of the last request that was affected. `recover_s`: until its end. `left_s`: the longest
    time, from the fault or the begin of a request, until it was begun at another replica. `gap_s`: the longest time
    after the fault that a connected client had no sign of an answer that came out right, beyond what an unbroken one
    takes: between two pieces of a stream, and from the fault (or the request, if later) to a whole answer less the time
    that one of its length took before. Time in which the request stood in the queue of a full engine, which then began
    to answer it, is no gap (`queued_s`, the longest): its client had brought it to a live replica, and room there is a
    matter of how many replicas there are. Time at an engine that its client left before a token is a gap, queue or not.
    `longer_s`: the most that an answer took in all beyond an unbroken one of its length; what a whole answer had spent
    when it began anew counts here, too, and the queue. `ready` of `ready_due` replicas were ready after the fault.
    `note`: what else is to be said of it. `unwell`: what was not as it should be after the run, and was repaired.
    `broken`: why the run itself could not be made, so that nothing was measured.
    """

    fault: str
    sent: int
    answered: int = 0
    resumed: int = 0
    repeated: int = 0
    reported: int = 0
    needless: int = 0
    lost: int = 0
    worked_twice: int = 0
    notice_s: float | None = None
    recover_s: float | None = None
    left_s: float | None = None
    gap_s: float | None = None
    queued_s: float = 0.0
    longer_s: float | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    ready: int = 0
    ready_due: int = 0
    note: str = ""
    unwell: str = ""
    broken: str = ""


def count(
    fault: str,
    lines: Iterable[Line],
    work: Iterable[Line],
    *,
    fault_at: float,
    hides_records: bool = False,
    comes_and_goes: bool = False,
    ends_service: bool = False,
) -> Outcome:
    """What became of the requests of a run whose fault happened at `fault_at` (monotonic seconds).

    `hides_records`: a program that starts during the fault can find no service; its error is not needless.
    `comes_and_goes`: such a program meets the fault with its own request, whose gap counts; its begin does not
    tell when the fault was noticed.
    `ends_service`: the only replica ends; the error of a request that no engine has begun is not needless.
    """
    requests = list(lines)
    begun: dict[str, list[str]] = defaultdict(list)
    begun_at: dict[str, list[float]] = defaultdict(list)
    queued: dict[str, list[tuple[float, float]]] = defaultdict(list)
    entries = sorted(work, key=lambda entry: entry["at"])
    left = {entry["request"] for entry in entries if entry["event"] == "abort" and not entry.get("tokens")}
    for entry in entries:
        if entry["event"] == "begun" and (name := _NAME.search(entry["context"])):
            begun[name[1]].append(entry["context"])
            begun_at[name[1]].append(entry["at"])
            if entry.get("request") not in left:
                queued[name[1]].append((entry["at"] - entry.get("waited_s", 0.0), entry["at"]))
    kinds = {request["name"]: _kind(request, begun[request["name"]]) for request in requests}
    counts = Counter(kinds.values())

    def is_needless(request: Line) -> bool:
        if kinds[request["name"]] != "reported" or _may_be_reported(request, hides_records=hides_records):
            return False
        return bool(begun[request["name"]]) or not ends_service

    needless = [request for request in requests if is_needless(request)]
    lost = [request for request in requests if kinds[request["name"]] == "lost"]
    due = [request for request in requests if kinds[request["name"]] == "reported" and not is_needless(request)]
    reasons = Counter(map(reason, [*needless, *lost]))
    reasons.update(f"{request['error']}, where nothing better was possible" for request in due)

    def unqueued_s(request: Line) -> float:
        return _took_s(request) - _total_s(queued[request["name"]])

    before = [request for request in requests if request["outcome"] == "right" and request["ended"] < fault_at]
    usual_s = statistics.median(map(unqueued_s, before)) if before else 0.0
    token_s = statistics.median(unqueued_s(request) / request["tokens"] for request in before) if before else 0.0
    after = [request for request in requests if request["ended"] >= fault_at]
    waited = [request for request in after if request["outcome"] == "right"]
    if not comes_and_goes:
        waited = [request for request in waited if request["client"] != "fresh"]

    def is_affected(request: Line) -> bool:
        if hides_records and request["client"] == "fresh":
            return False  # it can find no service until the end of the fault, whoever notices it
        if ends_service and kinds[request["name"]] == "reported" and not is_needless(request):
            return False
        return kinds[request["name"]] != "answered" or unqueued_s(request) > usual_s + max(NOTABLE_S, usual_s)

    affected = [request for request in after if is_affected(request)]
    noticing = [request for request in affected if not (comes_and_goes and request["client"] == "fresh")]
    is_hung = any(request["outcome"] == "hung" for request in affected)
    return Outcome(
        fault=fault,
        sent=len(requests),
        answered=counts["answered"],
        resumed=counts["resumed"],
        repeated=counts["repeated"],
        reported=counts["reported"],
        lost=len(lost),
        needless=len(needless),
        worked_twice=sum(max(0, len(contexts) - 1) for contexts in begun.values()),
        notice_s=max(0.0, max(request["started"] for request in noticing) - fault_at) if noticing else None,
        recover_s=max(request["ended"] for request in affected) - fault_at if affected and not is_hung else None,
        left_s=max((_left_s(begun_at[request["name"]], fault_at) for request in waited), default=None),
        gap_s=max((_gap_s(request, fault_at, token_s, queued[request["name"]]) for request in waited), default=None),
        queued_s=max((_total_s(queued[request["name"]], since=fault_at) for request in waited), default=0.0),
        longer_s=max((max(0.0, _took_s(request) - _unbroken_s(request, token_s)) for request in waited), default=None),
        reasons=dict(reasons.most_common()),
    )


def _kind(request: Line, contexts: list[str]) -> str:
    if request["outcome"] == "error" and request["is_typed"]:
        return "reported"
    if request["outcome"] != "right":
        return "lost"
    if any(_BEGUN_ANSWER.search(context) for context in contexts):
        return "resumed"
    return "repeated" if len(contexts) > 1 else "answered"


def _may_be_reported(request: Line, *, hides_records: bool) -> bool:
    """Whether nothing better than an error was possible: a begun stream that cannot be resumed, or no records."""
    is_begun = request["first"] is not None
    return bool(request["variant"] and is_begun) or (hides_records and request["client"] == "fresh")


def reason(request: Line) -> str:
    """Why a request has no right answer, in a few words."""
    what = f"stream {request['variant']}".strip() if request["stream"] else "whole answer"
    kind = f"{request['client']} {what}"
    if request["outcome"] == "error":
        first_line = request["text"].partition("\n")[0]
        return f"{kind}: {request['error']}: {re.sub(r'/[^ ,;]+', '…', first_line)[:100]}"
    if request["outcome"] == "wrong":
        return f"{kind}: wrong: {re.sub(r'[0-9]+', 'N', request['text'].split(':')[0])}"
    return f"{kind}: no end within the bound"


def _took_s(request: Line) -> float:
    return float(request["ended"] - request["started"])


def _unbroken_s(request: Line, token_s: float) -> float:
    return float(request["tokens"] * token_s)


def _left_s(begun_at: Sequence[float], fault_at: float) -> float:
    """How long it took until the request was begun at another replica; 0 if it never was."""
    pairs = itertools.pairwise(begun_at)
    return max((again - max(before, fault_at) for before, again in pairs if again > fault_at), default=0.0)


def _gap_s(request: Line, fault_at: float, token_s: float, queued: Spans) -> float:
    def beyond_queue_s(start: float, end: float) -> float:
        start = max(start, fault_at)
        return end - start - _total_s(queued, since=start, until=end)

    if request["stream"] and "pauses" in request:
        pauses = [pause for pause in request["pauses"] if pause[1] > fault_at]
        return max((beyond_queue_s(*pause) for pause in pauses), default=min(request["gap_s"], PAUSE_S))
    if request["stream"]:
        return float(request["gap_s"])
    return max(0.0, beyond_queue_s(request["started"], request["ended"]) - _unbroken_s(request, token_s))


def _total_s(spans: Spans, *, since: float = -math.inf, until: float = math.inf) -> float:
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in spans)
