"""Keeps a service up across the time limit of its job: a duty of the program beside the launcher (service_keeper.py).

It submits the successor when that is due, tries again when one fails, and asks its own run to drain once the successor
has answered. When a successor is due is decided in handover.py; rendezvous/successor.py lets one program claim it. What
only a submission needs is imported for it, so that the program is small while it waits.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError, SchedulerUnavailableError
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.successor import (
    Successor,
    read_successor,
    replace_successor,
    successor_file,
    write_successor,
)
from hpc_serve.submit.services.handover import KEEP_UP, JobTimes, due_at, pause_s, times_of, was_stopped
from hpc_serve.submit.services.own_run import OwnRun
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN
from hpc_serve.submit.slurm.slurm_messages import ended_sentence

_log = logging.getLogger(__name__)
_FOLLOW_S = 1.0
_LOOK_S = 5.0
_LONGEST_LOOK_S = 60.0
_ASK_SLURM_S = 15.0  # about a successor that waits or starts
_TIMES_ARE_OLD_S = 600.0  # the limit of a job that runs can be changed
_WAY_DOWN_S = 20.0  # from the last answer to the end of the job
_LONGEST_DRAIN_S = 600.0  # of a job whose time limit was taken away
_END_SUCCESSOR_S = 20.0
_JUST_S = 5.0


@dataclass(kw_only=True)
class KeepUp(OwnRun):
    """The successor of one run of a job. `step` does what is due."""

    notice_s: float
    began_at: float = field(default_factory=time.time)
    _times: JobTimes | None = field(default=None, init=False)
    _times_at: float = field(default=-_TIMES_ARE_OLD_S, init=False)
    _slurm: SchedulerView = field(default_factory=lambda: SchedulerView(max_age_s=_ASK_SLURM_S), init=False)
    _submitted_at: float | None = field(default=None, init=False)

    def step(self, now: float) -> float | None:
        """Do what is due at `now`; returns in how many seconds to look again, None when nothing is left to do.

        Raises HpcServeError where something did not work; nothing is changed then, so it can be tried again.
        """
        if self.was_stopped():
            self.end_successor("its predecessor was stopped")
            return None
        seen = read_successor(self._file)
        if seen is not None and seen.is_submitted:
            return self._follow(seen, now)
        if seen is not None and not seen.may_be_tried(now):
            return _LOOK_S
        if (wait_s := self._due_in_s(now)) is None:
            return None
        if wait_s > 0:
            return min(wait_s, _LONGEST_LOOK_S)
        seen = read_successor(self._file)  # asking Slurm took a while
        return self._submit(seen, now) if seen is None or seen.may_be_tried(now) else _FOLLOW_S

    def finish(self, *, was_cancelled: bool) -> None:
        """The run ends, maybe in the moment in which the successor was submitted. Raises HpcServeError.

        Whoever cancels a job then could not know of its successor; at the time limit and after a failure it is wanted.
        """
        is_new = self._submitted_at is not None and time.time() - self._submitted_at < _JUST_S
        is_early = self._times is not None and time.time() < self._times.ends_at - _JUST_S
        if self.was_stopped():
            self.end_successor("its predecessor was stopped")
        elif was_cancelled and is_new and is_early:
            self.end_successor("its predecessor was cancelled")

    def was_stopped(self) -> bool:
        return was_stopped(self.own_drain_request(), self.own_record())

    def end_successor(self, why: str) -> None:
        """End a successor that was submitted, if it is not over. Raises HpcServeError."""
        from hpc_serve.submit.services.stop import stop
        from hpc_serve.submit.status.status_reader import read_status

        seen = read_successor(self._file)
        if seen is None or not seen.is_submitted:
            return
        _log.info("ending the successor, job %s: %s", seen.job_id, why)
        found = [one for one in read_status(self.store, self.service).replicas if one.job_id == seen.job_id]
        stop(self.store, found, drain_s=0, timeout_s=_END_SUCCESSOR_S)
        write_successor(self._file, replace(seen, problem=f"was ended: {why}"))

    # -- before there is one

    def _due_in_s(self, now: float) -> float | None:
        """Seconds until a successor is due, 0 once it is; None if never, since the job has no time limit."""
        record = self.own_record()
        start_s = record.measured.get("start_s") if record is not None else None
        if start_s is None:
            return _LOOK_S
        if self._times is None or now - self._times_at > _TIMES_ARE_OLD_S:
            self._ask_times(now)
        due = self._due_at(start_s)
        if due is not None and now >= due and self._times_at < now:
            self._ask_times(now)  # the time limit may have been raised
            due = self._due_at(start_s)
        return None if due is None else max(0.0, due - now)

    def _due_at(self, start_s: float) -> float | None:
        return due_at(self._times, start_s=start_s, notice_s=self.notice_s) if self._times is not None else None

    def _ask_times(self, now: float) -> None:
        job = scheduler.job_state(self.job_id)
        if job.state == UNKNOWN:
            self._note_before_tries(f"it is not known when job {self.job_id} ends: {job.detail}")
        if shutil.which("sbatch") is None:
            self._note_before_tries(str(scheduler.command_missing("sbatch")))
        self._note_before_tries("")
        self._times, self._times_at = times_of(job, seen_since=self.began_at), now
        if self._times is None:
            _log.info("job %s has no time limit: it needs no successor", self.job_id)

    def _note_before_tries(self, problem: str) -> None:
        """Let `status` know what stands in the way. Raises SchedulerUnavailableError if something does."""
        seen = read_successor(self._file)
        if (seen.problem if seen else "") != problem and (seen.tries if seen else 0) == 0:
            replace_successor(self.store, self.service, self._file, seen=seen, by=Successor(problem=problem))
        if problem:
            raise SchedulerUnavailableError(problem)

    def _submit(self, seen: Successor | None, now: float) -> float:
        mine = Successor(tries=1 + (seen.tries if seen else 0), claimed_at=now)
        if not replace_successor(self.store, self.service, self._file, seen=seen, by=mine):
            return _FOLLOW_S  # somebody else has just claimed it
        try:
            from hpc_serve.submit.services.services import add_replicas

            (job,) = add_replicas(self.store, self.service, 1, like=self.job_id)
        except InvalidRequestError as error:
            write_successor(self._file, replace(mine, problem=f"cannot be submitted: {error}"))
            raise
        except HpcServeError as error:
            self._try_again(mine, f"was not submitted: {error}", now)
            return _FOLLOW_S
        write_successor(self._file, replace(mine, job_id=job.job_id))
        self._submitted_at = time.time()
        _log.info("submitted the successor, job %s", job.job_id)
        return 0.0

    def _try_again(self, seen: Successor, problem: str, now: float) -> None:
        in_s = pause_s(seen.tries)
        _log.warning("the successor %s %s; trying again in %.0f s", seen.job_id or "", problem, in_s)
        write_successor(self._file, replace(seen, problem=problem, next_try_at=now + in_s))

    # -- once there is one

    def _follow(self, seen: Successor, now: float) -> float | None:
        runs = [record for record in self.store.read(self.service).records if record.job_id == seen.job_id]
        record = max(runs, key=lambda run: run.restart, default=None)
        if record is not None and record.state == "ready" and self._answers(record):
            self._hand_over(record, now)
            return None
        job = self._slurm.state(seen.job_id)
        if job.is_over:
            is_told = record is not None and record.is_final
            said = f"{record.state}: {record.reason}" if is_told and record is not None else ended_sentence(job)
            self._try_again(seen, said, now)
        return _LOOK_S if record is None else _FOLLOW_S

    def _answers(self, record: EndpointRecord) -> bool:
        from hpc_serve.client.replicas.probe import probe_record

        return probe_record(record, self.store.read_api_key(self.service)).status == "ready"

    def _hand_over(self, successor: EndpointRecord, now: float) -> None:
        """Ask our own run to drain, unless Slurm's notice has done so. From now on the other is the replica."""
        if self.own_drain_request() is None:
            if self._times is None:
                self._ask_times(now)
            left_s = self._times.ends_at - now - _WAY_DOWN_S if self._times is not None else _LONGEST_DRAIN_S
            by = f"{KEEP_UP}: job {successor.job_id} has taken over"
            ask_to_drain(self.own_drain_file, DrainRequest(by=by, deadline_s=max(1.0, left_s), requested_at=now))
        _log.info("job %s has answered: this run drains", successor.job_id)

    @property
    def _file(self) -> Path:
        return successor_file(self.store, self.service, job_id=self.job_id)
