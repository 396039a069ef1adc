"""Finds the replicas whose network keeps answers back.

A network that carries all of it late carries words of streams, too, so that none stands still, and a whole answer waits
in it for seconds. So a replica from which nothing has come yet of some request is asked at a slow pace, in the
background, unless it is asked anyway (`silence`). It is late if an answer takes much longer than usual, or does not
come, or the question had to be sent again. That is no reason to give it up. New
requests go elsewhere for a moment, and another replica may be asked beside it (`hedge`); one that is late twice in a
row is on `probation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.silence.aside import Aside, Asker
from hpc_serve.client.silence.questions import Sign

ASK_S = 0.5
# An answer is late after so long, or after so many times what is usual: it is not waited for any longer.
LATE_S = 0.25
LATE_TIMES = 2.0
LATE_FOR_S = 1.0  # after a late answer
_ROUND = 1.2  # so much longer is waited for it, so that what is just in time is seen to be
_NEWEST, _NEWEST_LATE = 0.2, 0.02  # what the newest answer counts of what is usual
# The clients of an engine share the cost: together they ask it fifty times a second at most. Now and then its figures
# tell how many requests it has.
SHARE_S = 0.02
FIGURES_S = 5.0


@dataclass
class _Case:
    """What is known of one replica."""

    ask_at_s: float
    usual_s: float = 0.0
    late_at_s: float = -math.inf
    times: int = 0
    under_way: int = 0
    figures_at_s: float = -math.inf

    @property
    def late_s(self) -> float:
        return max(LATE_S, LATE_TIMES * self.usual_s)


class Lateness:
    """For one thread at a time."""

    def __init__(self, questions: Asker, *, start: Callable[[Callable[[], None]], object]) -> None:
        self._aside = Aside(questions, start=start)
        self._waiting: dict[str, int] = {}
        self._cases: dict[str, _Case] = {}
        self._late: Set[str] = frozenset()

    def after_fork(self) -> None:
        """In a forked process."""
        self._aside.after_fork()

    @property
    def often(self) -> Set[str]:
        """Those that were late twice in a row, the last time just now."""
        return {name for name in self.names if self._cases[name].times > 1}

    @property
    def names(self) -> Set[str]:
        """Those that are late."""
        return self._late

    def look(self, waiting: Mapping[ReplicaAddress, int], now_s: float) -> None:
        """Ask those that keep requests of ours waiting, if it is time; `waiting` has how many requests each has."""
        asked, signs = self._aside.take_answers()
        self._waiting = {replica.name: count for replica, count in waiting.items()}
        for name in self._waiting:
            self._cases.setdefault(name, _Case(now_s + ASK_S))
        for name in [replica.name for replica in asked if replica in waiting]:
            self.note(name, signs.get(name), now_s)
        due = {
            replica: now_s - self._cases[replica.name].figures_at_s >= FIGURES_S
            for replica in waiting
            if now_s >= self._cases[replica.name].ask_at_s
        }
        if due and not self._aside.is_asking:
            self._aside.ask(due, _ROUND * max(self._cases[replica.name].late_s for replica in due))
        self._late = {name for name, case in self._cases.items() if now_s - case.late_at_s < LATE_FOR_S}
        self._cases = {name: case for name, case in self._cases.items() if name in self._waiting or name in self._late}

    def note(self, name: str, sign: Sign | None, now_s: float) -> None:
        """What came of a question to a replica, whoever asked it: the next one is asked a while later."""
        if (case := self._cases.get(name)) is None:
            return
        is_late = sign is None or not sign.is_answer or sign.was_sent_again or sign.took_s > case.late_s
        case.times = case.times + 1 if is_late else 0
        if is_late:
            case.late_at_s = now_s
        if sign is not None:
            case.usual_s += (_NEWEST_LATE if is_late else _NEWEST) * (sign.took_s - case.usual_s)
            if sign.figures is not None:
                case.under_way, case.figures_at_s = sign.figures.under_way, now_s
        case.ask_at_s = now_s + max(ASK_S, SHARE_S * case.under_way / self._waiting.get(name, 1))
