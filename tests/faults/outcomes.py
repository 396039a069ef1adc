"""Counts what became of the requests of one run. Pure: lines of the load and of the engines in, one `Outcome` out.

The load says whether an answer was right and when; the engines' work logs say how often a request was worked on. A
request is *answered* by one engine, *repeated* from its beginning, *resumed* by an engine that was given the beginning
of the answer, *reported* by a typed error of openai or hpc_serve, or *lost*: wrong, hung, or ended by another error.
A report is *needless* if the request could have been resumed or repeated, or was with the only engine when that was
told to end.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"Request ([0-9a-f]+-\d+): say something\.")
_BEGUN_ANSWER = re.compile(r"w\d+\.[0-9a-f]{4}$")
# A request is affected if it took this much longer than requests before the fault.
NOTABLE_S = 1.5

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: counts of requests, and seconds from the fault on; None where there is nothing to tell.

    `notice_s`: until the start of the last request that was affected. `recover_s`: until its end. `gap_s`: the longest
    time that a connected client waited for the next piece of an answer that came out right, or more than usual for a
    whole answer. `ready` of `ready_due` replicas were ready after the fault. `unwell`: what was not as it should be
    after the run, and was repaired. `broken`: why the run itself could not be made, so that nothing was measured.
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
    gap_s: float | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    ready: int = 0
    ready_due: int = 0
    unwell: str = ""
    broken: str = ""


def count(
    fault: str,
    lines: Iterable[Line],
    work: Iterable[Line],
    *,
    fault_at: float,
    hides_records: bool = False,
    ends_service: bool = False,
) -> Outcome:
    """What became of the requests of a run whose fault happened at `fault_at` (monotonic seconds).

    `hides_records`: a program that starts during the fault can find no service; its error is not needless.
    `ends_service`: the only replica ends; the error of a request that no engine has begun is not needless.
    """
    requests = list(lines)
    begun: dict[str, list[str]] = defaultdict(list)
    for entry in work:
        if entry["event"] == "begun" and (name := _NAME.search(entry["context"])):
            begun[name[1]].append(entry["context"])
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

    before = [request for request in requests if request["outcome"] == "right" and request["ended"] < fault_at]
    usual_s = statistics.median(_took_s(request) for request in before) if before else 0.0
    after = [request for request in requests if request["ended"] >= fault_at]

    def is_affected(request: Line) -> bool:
        if hides_records and request["client"] == "fresh":
            return False  # it can find no service until the end of the fault, whoever notices it
        if ends_service and kinds[request["name"]] == "reported" and not is_needless(request):
            return False
        return kinds[request["name"]] != "answered" or _took_s(request) > usual_s + max(NOTABLE_S, usual_s)

    affected = [request for request in after if is_affected(request)]
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
        notice_s=max(0.0, max(request["started"] for request in affected) - fault_at) if affected else None,
        recover_s=max(request["ended"] for request in affected) - fault_at if affected and not is_hung else None,
        gap_s=max((_gap_s(request, usual_s) for request in after if _counts_for_gap(request)), default=None),
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


def _counts_for_gap(request: Line) -> bool:
    return request["outcome"] == "right" and request["client"] != "fresh"


def _gap_s(request: Line, usual_s: float) -> float:
    """What the client waited more than usual: between pieces of a stream, or for a whole answer."""
    return float(request["gap_s"]) if request["stream"] else max(0.0, _took_s(request) - usual_s)
