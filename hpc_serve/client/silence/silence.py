"""Finds the replicas that have gone silent with requests of this client under way, within one to two seconds.

A replica from which nothing comes is asked for a sign of life. It is given up if it leaves two connections unanswered,
if it answers and its engine makes no step although it has requests, or if the network to it loses what is sent. That is
little evidence, so it is believed only while another replica answers: the last one that does is never given up here,
and where none answers the fault may be this program's or its network's. What takes longer to tell, a replica without
another, is left to the looks of `discovery`. When a replica that was given up has its turn again is decided in
`probation`, and what becomes of the requests in `exchange`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Protocol

from hpc_serve.client.replicas.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.replicas.probe import in_background
from hpc_serve.client.silence.aside import Asker
from hpc_serve.client.silence.lateness import Lateness
from hpc_serve.client.silence.probation import Probation
from hpc_serve.client.silence.pulse import Pulse
from hpc_serve.client.silence.questions import Questions, Sign

ANSWER_S = 0.6  # on two connections, side by side
WITNESSES = 2
# This program stood still, if anything takes so much longer than it may. After a long time all begins anew.
LATE_S = 0.5
LONG_STILL_S = 2.0
# What a slow engine reads of a prompt in a second: 4,000 tokens.
PROMPT_BYTES_S = 16 << 10

# A replica whose engine hung is chosen last for so long. By then its launcher has found out, too.
HUNG_COUNTS_S = 15.0


class Heard(Protocol):
    """What is heard of one request: when the replica last sent something, and whether it is a stream that has begun.

    `prompt_bytes` were sent to it at `began_at_s`.
    """

    began_at_s: float
    prompt_bytes: int
    heard_at_s: float
    is_talking: bool

    @property
    def replica(self) -> ReplicaAddress: ...


class Silence:
    """The replicas of one service. For one thread at a time."""

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        questions: Asker | None = None,
        probation: Probation | None = None,
        lateness: Lateness | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._questions = questions or Questions()
        self._probation = probation or Probation(Questions(), start=in_background)
        self._lateness = lateness or Lateness(Questions(), start=in_background)
        self._clock = clock
        self._pulses: dict[str, Pulse] = {}
        self._hung_at_s: dict[str, float] = {}

    @property
    def late(self) -> Set[str]:
        """Those whose network keeps answers back, by the last `listen`."""
        return self._lateness.names

    def stood_still(self, seconds: float) -> None:
        """This program stood still: what it has not heard in that time says nothing."""
        for pulse in self._pulses.values():
            if seconds > LONG_STILL_S:
                pulse.start(self._clock())
            else:
                pulse.skip(seconds)

    def after_fork(self) -> None:
        """In a forked process: the requests and connections are those of the other one."""
        self._questions.after_fork()
        self._probation.after_fork()
        self._lateness.after_fork()
        self._pulses = {}

    def listen(self, requests: Collection[Heard]) -> dict[str, str]:
        """What is heard of the requests under way; the replicas that are lost, and why."""
        now_s = self._clock()
        replicas = {request.replica.name: request.replica for request in requests}
        self._questions.keep(set(replicas.values()))
        self._hear(requests, replicas, now_s)
        halting = {name for name in replicas if self._pulses[name].is_halting(now_s)}
        self._probation.look(self._pool.others(set()), now_s)
        self._lateness.look(_waiting(requests) if len(self._pool) > 1 else {}, now_s)
        for name in (self._lateness.often & replicas.keys()) - self._probation.names:
            self._probation.enter(replicas[name], now_s)
        self._pool.doubt_also(halting | self._hung(now_s) | self._probation.names | self._lateness.names)
        asked = [replica for name, replica in replicas.items() if self._pulses[name].wants_question(now_s)]
        if not asked or (len(asked) == 1 and not self._pool.others({asked[0].name})):
            return {}
        for replica in asked:
            self._pulses[replica.name].was_asked(now_s)
        signs = self._questions.ask(dict.fromkeys(asked, True), ANSWER_S)
        if (took_s := self._clock() - now_s) > ANSWER_S + LATE_S:
            self.stood_still(took_s)
            return {}
        for replica in asked:
            self._lateness.note(replica.name, signs.get(replica.name), self._clock())
        self._hear(requests, replicas, self._clock())
        counts = Counter(request.replica.name for request in requests)
        lost = self._judge({replica.name: counts[replica.name] for replica in asked}, signs, now_s)
        if not lost:
            return {}
        heard = {name for name in replicas if self._pulses[name].was_heard_since(now_s)}
        answering = {name for name, sign in signs.items() if sign.is_answer}
        steady = {name for name in answering | heard if not self._pulses[name].has_losses(self._clock())}
        if not self._is_witnessed(lost, steady - lost.keys()):
            return {}
        self._give_up([replicas[name] for name in lost])
        return lost

    def _hear(self, requests: Iterable[Heard], replicas: Collection[str], now_s: float) -> None:
        for name in self._pulses.keys() - set(replicas):
            self._pulses[name].start(now_s)
        words: dict[str, float] = {}
        signs = dict.fromkeys(replicas, -math.inf)
        reads_until = dict.fromkeys(replicas, -math.inf)
        stalled: dict[str, float] = {}
        for request in sorted(requests, key=lambda request: request.began_at_s):
            name, heard_at_s = request.replica.name, request.heard_at_s
            signs[name] = max(signs[name], heard_at_s)
            if request.is_talking:
                words[name] = max(words.get(name, -math.inf), heard_at_s)
                stalled[name] = min(stalled.get(name, math.inf), heard_at_s)
            else:
                began_at_s = max(reads_until[name], request.began_at_s)
                reads_until[name] = began_at_s + request.prompt_bytes / PROMPT_BYTES_S
        for name, sign_at_s in signs.items():
            pulse = self._pulses.setdefault(name, Pulse(now_s))
            pulse.hear(
                word_at_s=words.get(name),
                stalled_at_s=stalled.get(name),
                sign_at_s=sign_at_s,
                now_s=now_s,
                reads_until_s=reads_until[name],
            )

    def _hung(self, now_s: float) -> set[str]:
        return {name for name, at_s in self._hung_at_s.items() if now_s - at_s < HUNG_COUNTS_S}

    def _judge(self, asked: Mapping[str, int], signs: Mapping[str, Sign], asked_at_s: float) -> dict[str, str]:
        now_s = self._clock()
        lost = {}
        for name, requests in asked.items():
            pulse, sign = self._pulses[name], signs.get(name)
            if sign is not None and sign.was_sent_again:
                pulse.was_sent_again(now_s)
            if sign is not None and sign.is_answer:
                pulse.answered(sign.figures, now_s, requests=requests)
                if still_s := pulse.hung_s(now_s):
                    lost[name] = f"its engine has made no step for {still_s:.1f} s, although it has requests"
                    continue
            elif not pulse.was_heard_since(asked_at_s) and pulse.is_unusual(asked_at_s):
                lost[name] = f"nothing has come for {pulse.quiet_s(now_s):.1f} s, and no answer on two connections"
                continue
            if unsteady_s := pulse.unsteady_s(now_s):
                lost[name] = f"for {unsteady_s:.1f} s the network to it has lost what was sent"
        return lost

    def _is_witnessed(self, lost: Collection[str], steady: Collection[str]) -> bool:
        """Whether another replica answers now, or is `steady` anyway. Only then the lost ones are given up."""
        if steady:
            return True
        witnesses = self._pool.others(set(lost))[:WITNESSES]
        signs = self._questions.ask(dict.fromkeys(witnesses, False), ANSWER_S)
        return any(sign.is_answer and not sign.was_sent_again for sign in signs.values())

    def _give_up(self, lost: Iterable[ReplicaAddress]) -> None:
        now_s = self._clock()
        for replica in lost:
            pulse = self._pulses[replica.name]
            if pulse.hung_s(now_s):
                self._hung_at_s[replica.name] = now_s
            else:
                self._probation.enter(replica, now_s)
            pulse.given_up(now_s)


def _waiting(requests: Iterable[Heard]) -> dict[ReplicaAddress, int]:
    """How many requests each replica has, of those from which nothing has come yet for one."""
    counts = Counter(request.replica for request in requests)
    return {request.replica: counts[request.replica] for request in requests if not request.is_talking}
