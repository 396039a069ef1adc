"""Writes answers: whole lines appended to a file under a lock, found again by a later run, put in order at the end.

A file that holds anything but answers of this batch is never touched. A last line that was not written to its end is
cut off. Shards of a batch have files of their own, which `merge` joins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_serve.batch.request_file import IdIndex, index_requests, read_requests
from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError

_log = logging.getLogger(__name__)
_BEGINNING = b'{"id": "batch_req_'
_WHOLE = re.compile(rb'\{"id": "batch_req_\d+", "custom_id": ("(?:[^"\\]|\\.)*"), "response": .*\}\n', re.DOTALL)


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
    """A file of answers, open and locked. `close` removes it if it is empty. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = _open_locked(path)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written: {error.strerror}. Name an output in a folder that you can write to."
            ) from error
        try:
            self._size = _cut(self._descriptor, path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, line: bytes) -> None:
        """Write a whole line, or none of it. Raises StoreError."""
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
        if not self._size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._descriptor)

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.path} cannot be written: {error.strerror}. What it holds is whole. Make room, or end what keeps it "
            "from being written; the same command then goes on."
        )


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise HpcServeError(
                f"Another batch is writing {path}: wait until it has ended, or name another output. Shards of one "
                "batch are told apart by --shard 3/16."
            ) from None
        except OSError as error:
            _log.warning("%s: its filesystem has no locks (%s). Start no second batch on it.", path, error.strerror)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        os.close(descriptor)  # another batch removed or replaced it a moment ago


def _cut(descriptor: int, path: Path) -> int:
    """Cut off a last line that is not whole, and return the size. Raises InvalidRequestError for a file of others."""
    whole = 0
    with open(descriptor, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            if _WHOLE.fullmatch(line):
                whole += len(line)
                continue
            # The end of a node may leave zeros where the last lines were.
            rest = line.rstrip(b"\0\n")
            is_torn = not line.endswith(b"\n") and (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest))
            if is_torn and not file.read(1):
                break
            raise InvalidRequestError(
                f"{path}, line {number}, is no answer of a batch. Name another output: this file stays as it is."
            )
    if os.fstat(descriptor).st_size != whole:
        os.ftruncate(descriptor, whole)
    return whole


def read_answers(path: Path) -> Iterator[tuple[int, str]]:
    """Yield offset and custom_id of each whole line. A missing file has none."""
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if match := _WHOLE.fullmatch(line):
                    yield offset, json.loads(match[1])
                offset += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def find_answers(index: IdIndex, parts: Sequence[Path], requests: Path) -> array[int]:
    """Return where each id is answered, by its slot: 1 + offset × number of parts + part; 0 is nowhere.

    Raises InvalidRequestError where an answer belongs to no request, or two to one.
    """
    places = array("Q", bytes(8 * index.num_slots))
    for part, path in enumerate(parts):
        for offset, custom_id in read_answers(path):
            slot = index.slot(custom_id)
            if slot is None:
                raise InvalidRequestError(
                    f"{path} answers {custom_id!r}, which {requests} does not ask: it is of another batch. Name "
                    "another output, or put the request back."
                )
            if places[slot]:
                other = parts[(places[slot] - 1) % len(parts)]
                raise InvalidRequestError(
                    f"{custom_id!r} is answered in {other} and again in {path}: are these shards of two divisions? "
                    "Move the files of one division away."
                )
            places[slot] = 1 + offset * len(parts) + part
    return places


def write_in_order(requests: Path, index: IdIndex, parts: Sequence[Path], target: Path) -> int:
    """Write the lines of all parts to `target` in the order of their requests; return how many. Raises StoreError."""
    places = find_answers(index, parts, requests)
    temporary, count = target.with_name(f".{target.name}.{os.getpid()}.tmp"), 0
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) if path.exists() else None for path in parts]
            stack.callback(temporary.unlink, missing_ok=True)
            with temporary.open("wb") as written:
                for request in read_requests(requests):
                    place = places[index.slot(request.custom_id) or 0]
                    if place:
                        offset, part = divmod(place - 1, len(parts))
                        file = files[part]
                        assert file is not None
                        file.seek(offset)
                        written.write(file.readline())
                        count += 1
                written.flush()
                os.fsync(written.fileno())
            if count:
                os.replace(temporary, target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written: {error.strerror}. The answers are whole in their files."
        ) from error
    return count


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
    answers = [shard_path(output, shard) for shard in shards]
    with contextlib.ExitStack() as locks:
        for path in answers:
            if path.exists():
                locks.callback(AnswerFile(path).close)
        places = find_answers(index, [*answers, *map(errors_path, answers)], requests)
        missing = [
            shards[(position) % len(shards)]
            for position, request in enumerate(read_requests(requests))
            if not places[index.slot(request.custom_id) or 0]
        ]
        if missing:
            number, count = min(missing)
            raise InvalidRequestError(
                f"{len(missing)} of {len(index)} lines have no answer yet, the first of them in shard {number}: run it "
                f"again, --shard {number}/{count}, and then --merge."
            )
        done = write_in_order(requests, index, answers, output)
        return done, write_in_order(requests, index, [*map(errors_path, answers)], errors_path(output))
