"""All that can go wrong, as one tree. Each error says what happened, what decided it and what to do next.

    HpcServeError                    1
      InvalidRequestError            2   what was asked for cannot be (bad value, unknown model, bad site file)
        UnknownModelError            2
        SiteFileError                2
      DoesNotFitError                3   the model does not fit the machines, or vLLM refuses the layout
      SchedulerError                 4   Slurm is missing, does not answer, or said no
        SchedulerUnavailableError    4
        SubmissionRefusedError       4
      RendezvousError                5   the shared records cannot be read or written
        ServiceNotFoundError         5
          ServiceAsleepError         5   it ended because nobody used it, and can be woken
        AmbiguousServiceError        5
        ServiceConflictError         5
        RecordError                  5   a record is half-written, malformed or not ours
        StoreError                   5   the folder cannot be made, read or written (also an OSError)
      ServiceFailedError             6   a job ended, or ended before its service was ready
      WaitTimeoutError               7   nothing failed, but it was not ready in the time given
      NotAllReplicasError            1   some replicas did not do what all were told; it holds their answers
      StreamBrokenError              1   an answer broke off half-way and cannot go on; it holds what had come

The number is the exit code of every `hpc-serve` command that ends with the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class HpcServeError(Exception):
    """Any error that hpc-serve raises on purpose; its text is complete for a person to act on."""

    exit_code = 1


class InvalidRequestError(HpcServeError, ValueError):
    """A value asked for is not possible, whatever the cluster."""

    exit_code = 2


class UnknownModelError(InvalidRequestError):
    """No catalogue entry, folder or repository of that name is known."""


class SiteFileError(InvalidRequestError):
    """The site file has an unknown setting or a value of the wrong kind."""


class DoesNotFitError(HpcServeError):
    """The model does not fit the machines asked for, or vLLM refuses the layout."""

    exit_code = 3


class SchedulerError(HpcServeError):
    """The scheduler could not do what was asked."""

    exit_code = 4


class SchedulerUnavailableError(SchedulerError):
    """Slurm's commands are missing, or its controller does not answer. The job's state is unknown, not ended."""


class SubmissionRefusedError(SchedulerError):
    """sbatch refused the job; the text holds what it said."""


class RendezvousError(HpcServeError):
    """The shared folder of services cannot be used."""

    exit_code = 5


class ServiceNotFoundError(RendezvousError, LookupError):
    """No live service of that name; the text lists those there are."""


class ServiceAsleepError(ServiceNotFoundError):
    """The service's jobs ended because nobody asked for anything (--idle-stop); the text says how to wake it."""


class AmbiguousServiceError(RendezvousError, LookupError):
    """Several services are live and none was named."""


class ServiceConflictError(RendezvousError):
    """The name is taken by another model."""


class RecordError(RendezvousError, ValueError):
    """A shared file does not hold what it should; the text names the file and the field."""


class StoreError(RendezvousError, OSError):
    """The file system refused: a folder cannot be made, read or written, or belongs to somebody else."""


class ServiceFailedError(HpcServeError):
    """The service's job ended; the text names the part that failed and its last log lines."""

    exit_code = 6


class WaitTimeoutError(HpcServeError, TimeoutError):
    """The service did not become ready within the time given; it may still do so."""

    exit_code = 7


class NotAllReplicasError(HpcServeError):
    """Some replicas of a service did not do what all were told.

    `answers` has what each one said (hpc_serve.client.ReplicaAnswer), by its name.
    """

    def __init__(self, message: str, *, answers: Mapping[str, Any] = {}) -> None:
        super().__init__(message)
        self.answers = answers


class StreamBrokenError(HpcServeError):
    """A stream broke after it had begun, and cannot go on at another replica; the text says why.

    `text` and `token_ids` are the answer as far as it had come; of several answers, the first. `chunks` are the events
    of the stream as they came. `replica` is the name of the last engine's record.
    """

    def __init__(
        self,
        message: str,
        *,
        replica: str = "",
        text: str = "",
        token_ids: Sequence[int] = (),
        chunks: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.replica = replica
        self.text = text
        self.token_ids = tuple(token_ids)
        self.chunks = tuple(chunks)


def error_text(error: BaseException) -> str:
    """Return the text of an error, or the name of its class where it has none.

    >>> error_text(OSError("no route")), error_text(TimeoutError())
    ('no route', 'TimeoutError')
    """
    return str(error) or type(error).__name__
