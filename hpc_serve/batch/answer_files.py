"""Answers of a batch as they are written and yielded, and the files that hold them.

Answers are whole lines, appended to a file under a lock, found again by a later run, and put in order at the end. A
file that holds anything but answers of this batch is never touched. Shards of a batch have files of their own, which
`merge` joins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.batch.request_file import IdIndex, index_requests, read_requests
from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError

_log = logging.getLogger(__name__)
_LOCK_STEP_S = 0.5
_BEGINNING = b'{"id": "batch_req_'
_WHOLE = re.compile(rb'\{"id": "batch_req_\d+", "custom_id": ("(?:[^"\\]|\\.)*"), "response": .*\}\n', re.DOTALL)


@dataclass(kw_only=True)
class Progress:
    """How far a batch is. `answered` and `failed` count lines of this run.

    `before` lines were done by earlier runs; `failed_before` of them are in the errors file.
    Of the `total` lines, `in_flight` are under way, and at most `window` may be. `gpu_hours` are those of the service's
    replicas during this run. `serving_s` are the seconds since the service was ready; `stage` says what is done.
    """

    total: int = 0
    before: int = 0
    failed_before: int = 0
    answered: int = 0
    failed: int = 0
    in_flight: int = 0
    window: int = 0
    replicas: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    gpu_hours: float = 0.0
    serving_s: float = 0.0
    stage: str = "reads the requests"

    @property
    def left(self) -> int:
        return self.total - self.before - self.answered - self.failed

    @property
    def tokens_per_s(self) -> float | None:
        """Return generated tokens a second, prompt tokens where nothing is generated; None before the first answer."""
        tokens = self.generated_tokens or self.prompt_tokens
        return tokens / self.serving_s if tokens and self.serving_s else None

    @property
    def left_s(self) -> float | None:
        """Return the seconds left at the rate of this run; None before its first answer."""
        done = self.answered + self.failed
        return self.left * self.serving_s / done if done else None

    def count_tokens(self, body: Any) -> None:
        """Add the tokens that an answer says it took."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.generated_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one line, or its failure. `error` is None for an answer with status 200.

    `status` is None if no engine answered. `body` is the engine's, `progress` that of the batch after this answer.
    """

    line: int
    custom_id: str
    status: int | None = None
    request_id: str = ""
    body: Any = None
    error: Mapping[str, str] | None = None
    progress: Progress

    @property
    def json_line(self) -> bytes:
        """Return the line of the output, in OpenAI's Batch format."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        written = {
            "id": f"batch_req_{self.line}",
            "custom_id": self.custom_id,
            "response": response if self.status is not None else None,
            "error": self.error,
        }
        return json.dumps(written).encode() + b"\n"


def errors_path(output: Path) -> Path:
    """Return the file of the lines that got no answer.

    >>> errors_path(Path("out.jsonl"))
    PosixPath('out.errors.jsonl')
    """
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def shard_path(output: Path, shard: tuple[int, int]) -> Path:
    """Return the file of one shard's answers.

    >>> shard_path(Path("out.jsonl"), (3, 16))
    PosixPath('out.3-of-16.jsonl')
    """
    return output.with_name(f"{output.stem}.{shard[0]}-of-{shard[1]}{output.suffix}")


class AnswerFile:
    """A file of answers, open and locked. `read` comes before `append`; `close` removes the file if it is empty.

    `lines` is the number of lines that were read. `lock_s` bounds the wait for another's lock, in seconds. Raises
    StoreError, and HpcServeError where another batch writes it.
    """

    def __init__(self, path: Path, *, lock_s: float = 0.0) -> None:
        self.path = path
        self.lines = self._size = 0
        try:
            self._descriptor = _open_locked(path, lock_s)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written: {error.strerror}. Name an output in a folder that you can write to."
            ) from error

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield offset and custom_id of each whole line; cut off a last line that was not written to its end.

        Raises InvalidRequestError for a file of others, which stays as it is.
        """
        self.lines = self._size = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if match := _WHOLE.fullmatch(line):
                    yield self._size, json.loads(match[1])
                    self._size += len(line)
                    self.lines += 1
                    continue
                # The end of a node may leave zeros where the last lines were.
                rest = line.rstrip(b"\0\n")
                is_torn = not line.endswith(b"\n") and (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest))
                if not is_torn or file.read(1):
                    raise InvalidRequestError(
                        f"{self.path}, line {number}, is no answer of a batch. Name another output: this file stays as "
                        "it is."
                    )
        if os.fstat(self._descriptor).st_size != self._size:
            os.ftruncate(self._descriptor, self._size)

    def append(self, line: bytes) -> None:
        """Write a whole line, or none of it. Raises StoreError, and HpcServeError if others write the file too."""
        if os.fstat(self._descriptor).st_size != self._size:  # not every filesystem has locks
            raise HpcServeError(
                f"{self.path} was changed by another program: end it, and any other batch on this file. The same "
                "command then goes on."
            )
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # the next write says why the first was short
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise self._unwritable(error) from error
        self._size += len(line)

    def sync(self) -> None:
        """Have the lines on disk: a network filesystem tells only now that it is full. Raises StoreError."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        if not os.fstat(self._descriptor).st_size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._descriptor)

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path} cannot be written: {error.strerror}. What it holds is whole. Make room, or end what keeps it "
            "from being written; the same command then goes on."
        )


def _open_locked(path: Path, lock_s: float) -> int:
    ends_s = time.monotonic() + lock_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        is_ours = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        except OSError as error:
            _log.warning("%s: its filesystem has no locks (%s). Start no second batch on it.", path, error.strerror)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise InvalidRequestError(f"{path} is no file: name another output.")
        with contextlib.suppress(FileNotFoundError):
            # Another batch may have removed or replaced it a moment ago.
            if is_ours and found.st_ino == os.stat(path).st_ino:
                return descriptor
        os.close(descriptor)
        if not is_ours:
            if time.monotonic() > ends_s:
                raise HpcServeError(
                    f"Another batch is writing {path}: wait until it has ended, or name another output. Shards of one "
                    "batch are told apart by --shard 3/16."
                )
            time.sleep(_LOCK_STEP_S)


def find_answers(index: IdIndex, files: Sequence[AnswerFile], requests: Path) -> array[int]:
    """Return where each id is answered, by its slot: 1 + offset × number of files + file; 0 is nowhere.

    Raises InvalidRequestError where an answer belongs to no request, or two to one.
    """
    places = array("Q", bytes(8 * len(index)))
    for number, file in enumerate(files):
        for offset, custom_id in file.read():
            slot = index.slot(custom_id)
            if slot is None:
                raise InvalidRequestError(
                    f"{file.path} answers {custom_id!r}, which {requests} does not ask: it is of another batch. Name "
                    "another output, or put the request back."
                )
            if places[slot]:
                other = files[(places[slot] - 1) % len(files)].path
                raise InvalidRequestError(
                    f"{custom_id!r} is answered in {other} and again in {file.path}: by shards of two divisions, or by "
                    "two batches at once. Move the files of one division away, or remove one of the lines."
                )
            places[slot] = 1 + offset * len(files) + number
    return places


def write_in_order(
    requests: Path, index: IdIndex, places: Sequence[int], files: Sequence[AnswerFile], targets: tuple[Path, Path]
) -> tuple[int, int]:
    """Write what `find_answers` found to two files, of answers and of errors, in the order of the requests.

    Every second of the `files` is one of errors. Return how many lines each target has. A target that would have none
    stays as it is. Raises StoreError.
    """
    temporaries, counts = [target.with_name(f".{target.name}.tmp") for target in targets], [0, 0]
    try:
        with contextlib.ExitStack() as stack:
            for temporary in temporaries:
                stack.callback(temporary.unlink, missing_ok=True)
            read = [stack.enter_context(file.path.open("rb")) for file in files]
            written = [stack.enter_context(temporary.open("wb")) for temporary in temporaries]
            for request in read_requests(requests):
                offset, number = divmod(places[index.slot(request.custom_id) or 0] - 1, len(files))
                if offset >= 0:
                    read[number].seek(offset)
                    written[number % 2].write(read[number].readline())
                    counts[number % 2] += 1
            for file in written:
                file.flush()
                os.fsync(file.fileno())
            for temporary, target, count in zip(temporaries, targets, counts):
                if count:
                    os.replace(temporary, target)
    except OSError as error:
        raise StoreError(
            f"{targets[0]} cannot be written in order: {error.strerror}. The answers are whole in their files."
        ) from error
    return counts[0], counts[1]


def merge(requests: str | Path, output: str | Path) -> tuple[int, int]:
    """Join the files of all shards in the order of the requests; return how many answers and errors there are.

    The shards' files stay. Raises InvalidRequestError if the output exists or answers are missing, and StoreError.
    """
    requests, output = Path(requests), Path(output)
    division = re.compile(rf"{re.escape(output.stem)}\.(\d+)-of-(\d+){re.escape(output.suffix)}")
    names = os.listdir(output.absolute().parent)
    found = {(int(match[1]), int(match[2])) for name in names if (match := division.fullmatch(name))}
    counts = {count for _, count in found}
    if len(counts) != 1:
        raise InvalidRequestError(
            f"There are shards of {' and of '.join(map(str, sorted(counts)))} beside {output}: move those of one away."
            if counts
            else f"There are no shards beside {output}, such as {shard_path(output, (1, 16)).name}: run them first."
        )
    shards = [(number, max(counts)) for number in range(1, max(counts) + 1)]
    targets = (output, errors_path(output))
    if there := [path for path in targets if path.exists()]:
        raise InvalidRequestError(f"{there[0]} is there already: move it away, or name another output.")
    index = index_requests(requests)
    with contextlib.ExitStack() as locks:
        files = []
        for answers in (shard_path(output, shard) for shard in shards):
            for path in (answers, errors_path(answers)):
                files.append(AnswerFile(path))
                locks.callback(files[-1].close)
        places = find_answers(index, files, requests)
        missing = [
            shards[position % len(shards)]
            for position, request in enumerate(read_requests(requests))
            if not places[index.slot(request.custom_id) or 0]
        ]
        if missing:
            number, count = min(missing)
            raise InvalidRequestError(
                f"{len(missing)} of {len(index)} lines have no answer yet, the first of them in shard {number}: run it "
                f"again, --shard {number}/{count}, and then --merge."
            )
        return write_in_order(requests, index, places, files, targets)
