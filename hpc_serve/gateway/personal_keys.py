"""The file of personal keys. It holds SHA-256 hashes; a key itself is shown once, when it is made.

A plain hash is enough, since a key is 256 random bits. Gateways read the file; the command `key` changes it.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.rendezvous.claims import lock_file
from hpc_serve.rendezvous.fields import Timestamp
from hpc_serve.rendezvous.files import make_private_folder, read_json, write_json
from hpc_serve.rendezvous.names import is_service_name
from hpc_serve.rendezvous.ownership import fault

_FILE = "keys.json"


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person with a key, since a time in seconds since the epoch. A limit of None is no limit."""

    name: str
    key_sha256: str
    since: Timestamp
    max_in_flight: int | None
    tokens_a_day: int | None


@dataclass(frozen=True, kw_only=True)
class _File:
    people: tuple[Person, ...]


def hash_key(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class DamagedKeysError(RecordError):
    """The file of keys holds something else, though nobody else can change it; the text says what to do."""


def read_people(folder: Path) -> tuple[Person, ...]:
    """Return the persons with a key; none without a file.

    Raises StoreError, DamagedKeysError, and RecordError if others can change the file.
    """
    path = folder / _FILE
    try:
        return read_json(_File, path).people
    except FileNotFoundError:
        return ()
    except RecordError as error:
        if fault(path, "own") is not None:
            raise
        said = str(error).removesuffix("; remove it.").removesuffix(" Remove it.").removesuffix(".")
        raise DamagedKeysError(
            f"The personal keys are damaged: {said}. Gateways that run keep to the keys that they read last; a gateway "
            "that starts takes its owner's key alone. Put a whole copy back (a key that was revoked since is in it "
            f"again: revoke it), or end all personal keys (rm {shlex.quote(str(path))}) and make new ones: hpc-serve "
            "key add NAME."
        ) from error


def add_person(folder: Path, name: str, *, max_in_flight: int | None, tokens_a_day: int | None) -> str:
    """Return a new key for a person. Raises InvalidRequestError (a person of that name has one), RendezvousError."""
    if not is_service_name(name):
        raise InvalidRequestError(
            f"{name!r} cannot name a key: use 1 to 63 letters, digits, dots, dashes and underscores, the first a letter"
            " or digit."
        )
    key = secrets.token_urlsafe(32)
    with _changing(folder) as people:
        if name in people:
            raise InvalidRequestError(f"{name} has a key already. To make a new one: hpc-serve key revoke {name}")
        people[name] = Person(
            name=name,
            key_sha256=hash_key(key.encode()),
            since=time.time(),
            max_in_flight=max_in_flight,
            tokens_a_day=tokens_a_day,
        )
    return key


def revoke_key(folder: Path, name: str) -> None:
    """Remove the key of a person. Raises InvalidRequestError if there is none, RendezvousError."""
    with _changing(folder) as people:
        if people.pop(name, None) is None:
            raise InvalidRequestError(f"{name!r} has no key; `hpc-serve key list` shows who has one.")


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Person]]:
    """Yield the persons by name, and write what the caller makes of them."""
    make_private_folder(folder, tighten=False)
    with lock_file(folder / f"{_FILE}.lock"):
        people = {one.name: one for one in read_people(folder)}
        yield people
        write_json(folder / _FILE, _File(people=tuple(people.values())))
