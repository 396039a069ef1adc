"""Finds the replicas that have gone silent with requests of this client under way, within 1 to 3 s.

A replica from which nothing comes is asked for a sign of life. It is given up if it leaves two connections unanswered,
or if it answers and its engine makes no step although it has requests. That is little evidence, so it is believed only
while another replica answers: the last one that does is never given up here, and where none answers the fault may be
this program's or its network's. What takes longer to tell, a replica without another, is left to the looks of
`discovery`. What becomes of the requests is decided in `exchange`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from hpc_serve.client.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.pulse import Pulse
from hpc_serve.client.questions import Questions, Sign

ANSWER_S = 0.4  # on each of two connections, where streams have gone silent
QUIET_ANSWER_S = 0.6  # where no stream tells of the replica
WITNESSES = 2
LATE_S = 0.5  # this program stood still, if anything takes so much longer than it may

# A replica whose engine hung is chosen last for so long. By then its launcher has found out, too.
HUNG_COUNTS_S = 15.0


class Heard(Protocol):
    """What is heard of one request: when the replica last sent something, and whether it is a stream that has begun."""

    heard_at_s: float
    is_talking: bool

    @property
    def replica(self) -> ReplicaAddress: ...


class Asker(Protocol):
    """Asks replicas for a sign of life; True: for the engine's figures, too. The answers by record name."""

    def ask(self, replicas: Mapping[ReplicaAddress, bool], answer_s: float) -> dict[str, Sign]: ...
    def keep(self, replicas: Collection[ReplicaAddress]) -> None: ...


class Silence:
    """The replicas of one service. For one thread at a time."""

    def __init__(
        self, pool: ReplicaPool, *, questions: Asker | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._questions = questions or Questions()
        self._clock = clock
        self._pulses: dict[str, Pulse] = {}
        self._hung_at_s: dict[str, float] = {}

    def start_anew(self) -> None:
        """This program stood still: what it has not heard says nothing."""
        for pulse in self._pulses.values():
            pulse.start(self._clock())

    def after_fork(self) -> None:
        """In a forked process: the requests and connections are those of the other one."""
        self._questions.keep(())
        self._pulses = {}

    def listen(self, requests: Collection[Heard]) -> dict[str, str]:
        """What is heard of the requests under way; the replicas that are lost, and why."""
        now_s = self._clock()
        replicas = {request.replica.name: request.replica for request in requests}
        self._questions.keep(set(replicas.values()))
        self._hear(requests, replicas, now_s)
        silent = {name for name in replicas if self._pulses[name].is_silent(now_s)}
        self._pool.doubt_also(silent | self._hung(now_s))
        asked = [replica for name, replica in replicas.items() if self._pulses[name].wants_question(now_s)]
        if not asked or (len(asked) == 1 and not self._pool.others({asked[0].name})):
            return {}
        for replica in asked:
            self._pulses[replica.name].was_asked(now_s)
        answer_s = ANSWER_S if silent.intersection(replica.name for replica in asked) else QUIET_ANSWER_S
        signs = self._questions.ask(dict.fromkeys(asked, True), answer_s)
        if self._clock() - now_s > 2 * answer_s + LATE_S:
            self.start_anew()
            return {}
        self._hear(requests, replicas, self._clock())
        counts = Counter(request.replica.name for request in requests)
        lost = self._judge({replica.name: counts[replica.name] for replica in asked}, signs, now_s)
        return lost if lost and self._is_witnessed(lost, signs.keys() - lost.keys()) else {}

    def _hear(self, requests: Iterable[Heard], replicas: Collection[str], now_s: float) -> None:
        for name in self._pulses.keys() - set(replicas):
            self._pulses[name].start(now_s)
        words: dict[str, float] = {}
        signs = dict.fromkeys(replicas, -math.inf)
        for request in requests:
            name, heard_at_s = request.replica.name, request.heard_at_s
            signs[name] = max(signs[name], heard_at_s)
            if request.is_talking:
                words[name] = max(words.get(name, -math.inf), heard_at_s)
        for name, sign_at_s in signs.items():
            pulse = self._pulses.setdefault(name, Pulse(now_s))
            pulse.hear(word_at_s=words.get(name), sign_at_s=sign_at_s, now_s=now_s)

    def _hung(self, now_s: float) -> set[str]:
        return {name for name, at_s in self._hung_at_s.items() if now_s - at_s < HUNG_COUNTS_S}

    def _judge(self, asked: Mapping[str, int], signs: Mapping[str, Sign], asked_at_s: float) -> dict[str, str]:
        now_s = self._clock()
        lost = {}
        for name, requests in asked.items():
            pulse, sign = self._pulses[name], signs.get(name)
            if sign is not None:
                pulse.answered(sign.figures, now_s, requests=requests)
                if still_s := pulse.hung_s(now_s):
                    lost[name] = f"its engine has made no step for {still_s:.1f} s, although it has requests"
            elif not pulse.was_heard_since(asked_at_s):
                lost[name] = f"nothing has come for {pulse.quiet_s(now_s):.1f} s, and no answer on two connections"
        return lost

    def _is_witnessed(self, lost: Collection[str], answering: Collection[str]) -> bool:
        """Whether another replica answers now. Only then the lost ones are given up."""
        witnesses = self._pool.others(set(lost))[:WITNESSES] if not answering else []
        if not answering and not self._questions.ask(dict.fromkeys(witnesses, False), ANSWER_S):
            return False
        now_s = self._clock()
        for name in lost:
            if self._pulses[name].hung_s(now_s):
                self._hung_at_s[name] = now_s
            self._pulses[name].given_up(now_s)
        return True
