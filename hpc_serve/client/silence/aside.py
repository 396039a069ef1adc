"""Asks replicas for a sign of life in the background: whoever asks goes on, and looks for the answers later."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.silence.questions import Sign


class Asker(Protocol):
    """Asks replicas for a sign of life within `answer_s`; True: for the engine's figures, too. The answers by name."""

    def ask(self, replicas: Mapping[ReplicaAddress, bool], answer_s: float) -> dict[str, Sign]: ...
    def keep(self, replicas: Collection[ReplicaAddress]) -> None: ...
    def after_fork(self) -> None: ...


class Aside:
    """One round of questions at a time. For one thread at a time; `start` runs a function in another one."""

    def __init__(self, questions: Asker, *, start: Callable[[Callable[[], None]], object]) -> None:
        self._questions = questions
        self._start = start
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._answers: queue.SimpleQueue[tuple[Collection[ReplicaAddress], dict[str, Sign]]] = queue.SimpleQueue()
        self.is_asking = False

    def after_fork(self) -> None:
        """In a forked process: the connections, and the thread that asks, are those of the other one."""
        self._questions.after_fork()
        self._forget_answers()

    def ask(self, replicas: Mapping[ReplicaAddress, bool], answer_s: float) -> None:
        """Ask these, when the answers of the last round have been taken (`is_asking`)."""
        self._questions.keep(replicas)
        answers, questions = self._answers, self._questions

        def ask() -> None:
            signs: dict[str, Sign] = {}
            try:
                signs = questions.ask(replicas, answer_s)
            finally:
                answers.put((list(replicas), signs))

        self.is_asking = True
        try:
            self._start(ask)
        except RuntimeError:  # no more threads for this user: later
            self.is_asking = False

    def take_answers(self) -> tuple[Collection[ReplicaAddress], dict[str, Sign]]:
        """Who was asked in a round that is over since the last look, and what they answered, by name."""
        try:
            asked, signs = self._answers.get_nowait()
        except queue.Empty:
            return (), {}
        self.is_asking = False
        return asked, signs
