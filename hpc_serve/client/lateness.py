"""Finds the replicas whose network keeps answers back.

A network that carries all of it late carries words of streams, too, so that none stands still, and a whole answer waits
in it for seconds. So a replica from which nothing has come yet of some request is asked at a slow pace, in the
background, unless it is asked anyway (`silence`). It is late if an answer takes much longer than usual, or does not
come, or the question had to be sent again. That is no reason to give it up: new requests go elsewhere for a moment, and
another replica may be asked beside it (`hedge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from hpc_serve.client.aside import Aside, Asker
from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.client.questions import Sign

ASK_S = 0.5
ANSWER_S = 0.6  # on two connections, side by side
# An answer is late after so long, or after so many times what is usual.
LATE_S = 0.25
LATE_TIMES = 3.0
LATE_FOR_S = 1.0  # after a late answer
_NEWEST = 0.2  # what the newest answer counts of what is usual
# The clients of an engine share the cost: together they ask for its figures five times a second at most.
SHARE_S = 0.2


class Lateness:
    """For one thread at a time."""

    def __init__(self, questions: Asker, *, start: Callable[[Callable[[], None]], object]) -> None:
        self._aside = Aside(questions, start=start)
        self._ask_at_s: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._late_at_s: dict[str, float] = {}
        self._usual_s: dict[str, float] = {}

    def after_fork(self) -> None:
        """In a forked process."""
        self._aside.after_fork()

    def look(self, waiting: Mapping[ReplicaAddress, int], now_s: float) -> Set[str]:
        """Those that are late now. `waiting` are those to be asked, and how many requests of ours each has."""
        asked, signs = self._aside.take_answers()
        self._waiting = {replica.name: count for replica, count in waiting.items()}
        self._ask_at_s = {name: self._ask_at_s.get(name, now_s + ASK_S) for name in self._waiting}
        for name in [replica.name for replica in asked if replica in waiting]:
            self.note(name, signs.get(name), now_s)
        due = [replica for replica in waiting if now_s >= self._ask_at_s[replica.name]]
        if due and not self._aside.is_asking:
            self._aside.ask(dict.fromkeys(due, True), ANSWER_S)
        self._late_at_s = {name: at_s for name, at_s in self._late_at_s.items() if now_s - at_s < LATE_FOR_S}
        return self._late_at_s.keys()

    def note(self, name: str, sign: Sign | None, now_s: float) -> None:
        """What came of a question to a replica, whoever asked it: the next one is asked a while later."""
        usual_s = self._usual_s.get(name, 0.0)
        if sign is None or not sign.is_answer or sign.was_sent_again or sign.took_s > max(LATE_S, LATE_TIMES * usual_s):
            self._late_at_s[name] = now_s
        if sign is not None:
            self._usual_s[name] = usual_s + _NEWEST * (sign.took_s - usual_s)
        if name in self._waiting:
            under_way = sign.figures.under_way if sign is not None and sign.figures is not None else 0
            self._ask_at_s[name] = now_s + max(ASK_S, SHARE_S * under_way / self._waiting[name])
