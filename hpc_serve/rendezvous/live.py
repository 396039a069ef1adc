"""Reads the records of a service that a client may use, again and again, at the cost of the live records alone.

A record that says how its replica ended never changes again: it is read once, and passed over afterwards. The newest
record is read first. Each file that is read is checked as `store` checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.entries import ServiceRecords, in_order, jobs_begun, parse_entry, read_submitted
from hpc_serve.rendezvous.files import FileVersion, check_folder, list_newest_first, read_private
from hpc_serve.rendezvous.names import is_record_file_name
from hpc_serve.rendezvous.record import FINAL_STATES, EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore

# The line of an ended record, as the store writes it. It is a field of the record itself: those of an inner object
# begin with more blanks, and no text of JSON has a line end in it.
_ENDED_LINES = tuple(f'\n "state": "{state}"' for state in sorted(FINAL_STATES))


RecordFile = tuple[str, FileVersion]
"""A record by its file's name, and which version of the file was seen."""


class LiveRecords:
    """The records of one service that have not ended. Safe to share between threads."""

    def __init__(self, store: ServiceStore, service: str) -> None:
        self._store = store
        self._service = service
        self._ended: dict[str, FileVersion] = {}

    def files(self, wanted: Set[str] = frozenset()) -> tuple[list[RecordFile], Set[str]]:
        """Return the files of records that may be live, the newest first, and the names of all. Raises StoreError.

        Records in `wanted` are always among the files.
        """
        folder = self._store.service_dir(self._service)
        check_folder(folder)
        found = [file for file in list_newest_first(folder) if is_record_file_name(file[0])]
        ended = self._ended
        live = [file for file in found if ended.get(file[0]) != file[1] or file[0] in wanted]
        return live, {name for name, _ in found}

    def read(
        self, files: Iterable[RecordFile], problems: list[str], wanted: Set[str] = frozenset()
    ) -> list[EndpointRecord]:
        """Read the records that have not ended or are `wanted`. `problems` gets why others are not trusted."""
        folder = self._store.service_dir(self._service)
        records = []
        for name, version in files:
            path = folder / name
            try:
                text = read_private(path)
                if any(line in text for line in _ENDED_LINES):
                    self._ended[name] = version
                    if name not in wanted:
                        continue
                records.append(parse_entry(text, path, EndpointRecord, self._service))
            except FileNotFoundError:  # listed from a stale cache, or swept a moment ago
                continue
            except HpcServeError as error:
                problems.append(str(error))
        return records

    def read_all(self, wanted: Set[str] = frozenset()) -> ServiceRecords:
        """Read records that have not ended or are `wanted`, and submitted jobs without a record. Raises StoreError."""
        files, names = self.files(wanted)
        problems: list[str] = []
        records = self.read(files, problems, wanted)
        begun = jobs_begun(name.rpartition("-r")[0] for name in names)
        submitted = read_submitted(self._store.service_dir(self._service), self._service, problems, without=begun)
        return in_order(self._service, records, submitted, problems, seen=names - self._ended.keys())
