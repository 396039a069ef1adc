"""Replicas that were given up because nothing, or too little, came from them: chosen last until they answer steadily.

A network that comes and goes answers a probe now and then, and the next request stands still in it. So such a replica
is asked twice a second, beside the requests, and has its turn again after several good answers in a row; after more of
them, the more often it was given up lately. A replica without another is used all the same: the pool decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.silence.aside import Aside, Asker

ASK_S = 0.5
ANSWER_S = 0.4
ANSWERS = 10  # in a row, after it was given up once; after each further time twice as many
MOST_ANSWERS = 80
# After so long without being given up, or without being offered, what was before is forgotten.
FORGET_S = 120.0


@dataclass
class _Case:
    replica: ReplicaAddress
    given_up_at_s: float
    times: int = 1
    answers: int = 0
    is_over: bool = False

    @property
    def answers_due(self) -> int:
        return int(min(ANSWERS * 2 ** (self.times - 1), MOST_ANSWERS))


class Probation:
    """For one thread at a time. `start` runs a function in the background: an answer may take long, or never come."""

    def __init__(self, questions: Asker, *, start: Callable[[Callable[[], None]], object]) -> None:
        self._aside = Aside(questions, start=start)
        self._cases: dict[str, _Case] = {}
        self._asked_at_s = float("-inf")

    def after_fork(self) -> None:
        """In a forked process."""
        self._aside.after_fork()

    @property
    def names(self) -> Set[str]:
        """Who is to be chosen last."""
        return {name for name, case in self._cases.items() if not case.is_over}

    def enter(self, replica: ReplicaAddress, now_s: float) -> None:
        """A replica was given up."""
        before = self._cases.get(replica.name)
        self._cases[replica.name] = _Case(replica, now_s, times=before.times + 1 if before is not None else 1)

    def look(self, offered: Collection[ReplicaAddress], now_s: float) -> None:
        """Ask those that are offered, if it is time, and count what was answered. A new address is a new engine."""
        self._count()
        here = {replica.name: replica for replica in offered}
        for name, case in list(self._cases.items()):
            is_old = now_s - case.given_up_at_s > FORGET_S
            if (name in here and here[name] != case.replica) or (is_old and (case.is_over or name not in here)):
                del self._cases[name]
        due = [case.replica for case in self._cases.values() if not case.is_over and case.replica.name in here]
        if due and not self._aside.is_asking and now_s - self._asked_at_s >= ASK_S:
            self._asked_at_s = now_s
            self._aside.ask(dict.fromkeys(due, False), ANSWER_S)

    def _count(self) -> None:
        asked, signs = self._aside.take_answers()
        for replica in asked:
            case = self._cases.get(replica.name)
            if case is None or case.replica != replica:
                continue
            sign = signs.get(replica.name)
            is_good = sign is not None and sign.is_answer and not sign.was_sent_again
            case.answers = case.answers + 1 if is_good else 0
            case.is_over = case.answers >= case.answers_due
