"""The persons who ask a gateway with keys of their own: who they are, their limits, and what they use.

Every two seconds, in a thread, the file of keys is read, what persons have used is written, and what other gateways
have written is read. Requests of the owner do not come here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import defaultdict
from pathlib import Path

from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.gateway import use as uses
from hpc_serve.gateway.answers import FULL_RETRY_S, Refusal
from hpc_serve.gateway.personal_keys import DamagedKeysError, Person, hash_key, read_people
from hpc_serve.gateway.request import Request
from hpc_serve.gateway.use import AnswerCount, UnderWay, Use
from hpc_serve.printable import printable

LOOK_S = 2.0

_log = logging.getLogger(__name__)


class People:
    """The persons of one gateway. Raises RecordError for a file of keys that others can change, StoreError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = secrets.token_hex(6)
        self._by_hash: dict[str, Person] = {}
        self._under_way: defaultdict[str, UnderWay] = defaultdict(UnderWay)
        self._own: tuple[str, dict[str, Use]] = (uses.today(), {})
        self._others = uses.read_use(folder, self._own[0])
        self._saving = threading.Lock()
        self._saved: dict[str, Use] = {}
        self._problem = ""
        try:
            self._by_hash = _by_hash(folder)
        except DamagedKeysError:
            self.look()  # says so; the owner may ask
        uses.remove_earlier(folder, self._own[0])

    def with_key(self, key: bytes) -> Person | None:
        """Return the person of a key. Only its hash is looked up, so the time that takes tells nothing of the keys."""
        return self._by_hash.get(hash_key(key))

    # -- limits

    def begin(self, request: Request) -> None:
        """Count a person's request until `end`, with the tokens that it may use. Raises Refusal over a limit.

        A person with nothing under way and a token left of the day may ask, however much.
        """
        person = request.person
        if person is None:
            return
        under_way = self._under_way[person.name]
        if person.max_in_flight is not None and under_way.requests >= person.max_in_flight:
            text = f"{person.name} has {under_way.requests} requests under way at this gateway, and may have no more."
            raise _refusal("person_in_flight", f"{text} Try again when one has ended.", FULL_RETRY_S)
        if person.tokens_a_day is not None:
            used = sum(use.get(person.name, Use()).tokens for use in (self._use_today(), self._others))
            text = f"{person.name} has used {used:,} tokens today, and has {person.tokens_a_day:,} a day."
            if used >= person.tokens_a_day:
                raise _refusal("person_tokens", f"{text} The next day begins at midnight.", _seconds_to_midnight())
            if used + under_way.tokens >= person.tokens_a_day:
                text = f"{text} Requests under way may use the rest ({under_way.tokens:,} tokens)."
                raise _refusal("person_tokens", f"{text} Try again when one has ended.", FULL_RETRY_S)
        expected = uses.expected_use(request.route, request.content_type, request.body, request.fields)
        request.count = AnswerCount(under_way, expected)

    def end(self, request: Request) -> None:
        """Add what the answer has used."""
        if request.person is None or request.count is None:
            return
        name, use = request.person.name, request.count.use
        request.count.end()
        if use.requests:
            own = self._use_today()
            own[name] = own.get(name, Use()) + use

    def _use_today(self) -> dict[str, Use]:
        if (day := uses.today()) != self._own[0]:
            self._own, self._others = (day, {}), {}
        return self._own[1]

    # -- files

    async def follow(self) -> None:
        """Read and write files again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)
            await asyncio.to_thread(self.save)

    def look(self) -> None:
        """Read the file of keys. While it cannot be read, the last keys hold; if others can change it, none does."""
        problem = ""
        try:
            self._by_hash = _by_hash(self._folder)
        except DamagedKeysError as error:
            problem = str(error)
        except StoreError as error:
            problem = f"The personal keys cannot be read, and the last ones hold: {error}"
        except RecordError as error:
            self._by_hash, problem = {}, f"No personal key is taken: {error}"
        if problem != self._problem and problem:
            _log.warning("%s", printable(problem))
        self._problem = problem

    def save(self) -> None:
        """Write what was used through this gateway, and read the files of the others."""
        with self._saving:
            day, own = self._own[0], dict(self._own[1])
            name = uses.file_name(day, self._name)
            try:
                if own != self._saved:
                    uses.write_use(self._folder / name, own)
                    self._saved = own
                others = uses.read_use(self._folder, day, but=name)
            except HpcServeError as error:
                _log.warning("%s", printable(f"What was used today is not written or read: {error}"))
            else:
                self._others = others if day == self._own[0] else {}


def _by_hash(folder: Path) -> dict[str, Person]:
    return {person.key_sha256: person for person in read_people(folder)}


def _refusal(code: str, message: str, retry_s: int) -> Refusal:
    headers = {"retry-after": str(retry_s)}
    return Refusal(status=429, code=code, kind="rate_limit_error", message=message, headers=headers)


def _seconds_to_midnight() -> int:
    now = time.localtime()
    return int(time.mktime((now.tm_year, now.tm_mon, now.tm_mday + 1, 0, 0, 0, 0, 0, -1)) - time.time()) + 1
