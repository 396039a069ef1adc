"""The file of personal keys, and what the persons with a key have used today.

The file holds SHA-256 hashes; a key itself is shown once, when it is made. A plain hash is enough, since a key is 256
random bits. Gateways read the file; the command `key` changes it.

Use is counted for each answer, and written into one small file for each gateway and day. A day is that of the host's
clock. All gateways of a home write into one folder, so that their sum is known.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.client.resume.stream import DEFAULT_MAX_TOKENS
from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.rendezvous.claims import lock_file
from hpc_serve.rendezvous.fields import Timestamp, is_service_name
from hpc_serve.rendezvous.files import list_folder, make_private_folder, read_json, remove_file, write_json
from hpc_serve.rendezvous.ownership import fault

# -- what persons have used

_TOKENS = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens"\s*:\s*(\d{1,9})')
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json|delta)"\s*:\s*"[^"]')
_TOKEN_IDS = re.compile(rb'token_ids"\s*:\s*\[([\d,\s]*\d)')
_EVENT_END = b"\n\n"
_LONGEST_MATCH, _LONGEST_EVENT = 64, 1 << 20

# Estimates, for what nobody has counted: bytes of a token of English text, and tokens of an answer, or of a prompt that
# holds an image or sound, without a bound.
_BYTES_PER_TOKEN = 4
_UNBOUNDED_TOKENS = 4096
_MOST_TOKENS = 10**9
_BOUNDS_OF_ANSWER = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_TOKENS_OF_ANSWER = {
    "/v1/completions": DEFAULT_MAX_TOKENS,
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
            *("/cohere/v2/chat", "/inference/v1/generate", "/v1/audio/transcriptions", "/v1/audio/translations"),
        ),
        _UNBOUNDED_TOKENS,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Use:
    """Requests that were answered, their tokens, and their share of the time of the services' GPUs in seconds.

    While a service answers several requests, each has an equal share of its ready replicas' GPUs.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gpu_seconds: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            gpu_seconds=self.gpu_seconds + other.gpu_seconds,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def expected_use(route: str, content_type: str, body: bytes, fields: Mapping[str, Any]) -> Use:
    """Return the tokens that a request may use: of its prompt by its bytes, and of its answers by its bound.

    >>> expected_use("/v1/completions", "application/json", b"x" * 400, {"max_tokens": 50, "n": 2})
    Use(requests=0, prompt_tokens=100, completion_tokens=100, gpu_seconds=0.0)
    """
    prompt = len(body) // _BYTES_PER_TOKEN
    if content_type.startswith("multipart/") or b";base64," in body:
        prompt = min(prompt, _UNBOUNDED_TOKENS)
    given = (fields.get(name) for name in _BOUNDS_OF_ANSWER)
    answer: int = next((one for one in given if isinstance(one, int)), _TOKENS_OF_ANSWER.get(route, 0))
    prompts, answers = fields.get("prompt"), fields.get("n")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        answer *= len(prompts)
    answer *= answers if isinstance(answers, int) else 1
    return Use(prompt_tokens=prompt, completion_tokens=min(max(answer, 0), _MOST_TOKENS))


@dataclass(frozen=True, kw_only=True)
class _UseFile:
    people: Mapping[str, Use]


@dataclass(kw_only=True)
class UnderWay:
    """What a person has under way at a gateway: requests, and the tokens that they may use or have used by now."""

    requests: int = 0
    tokens: int = 0


class AnswerCount:
    """Counts the tokens of one answer as it passes, by its bytes. Its tokens are under way until `end`.

    The largest figures of its `usage` count. A text in JSON cannot hold them, since its quotes are escaped. A stream
    without `usage`, as one that broke, counts its token ids, or the events that carry text if it has no ids. A whole
    answer that broke counts a token for four bytes, up to those `expected`. If neither figures nor ids of the prompt
    came, those expected count.

    >>> count = AnswerCount(UnderWay(), Use(prompt_tokens=4))
    >>> count.begin(is_stream=True)
    >>> count.feed(b'data: {"choices": [{"text": "Hi"}]}\\n\\ndata: {"choices": [{"te')
    >>> count.feed(b'xt": " you"}]}\\n\\n')
    >>> count.use
    Use(requests=1, prompt_tokens=4, completion_tokens=2, gpu_seconds=0.0)
    >>> count.feed(b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 3}}\\n\\n')
    >>> count.use
    Use(requests=1, prompt_tokens=5, completion_tokens=3, gpu_seconds=0.0)
    """

    def __init__(self, under_way: UnderWay, expected: Use) -> None:
        self._under_way, self._expected = under_way, expected
        self._held = expected.tokens
        self._under_way.requests += 1
        self._under_way.tokens += self._held
        self._requests = self._prompt_tokens = self._completion_tokens = 0
        self._prompt_ids = self._ids = self._texts = self._bytes = 0
        self._is_stream = self._is_whole = False
        self._rest = b""
        self.gpu_seconds = 0.0

    def begin(self, *, is_stream: bool) -> None:
        """Count an answer that an engine gives."""
        self._requests = 1
        self._is_stream = is_stream

    def feed(self, data: bytes) -> None:
        """Count the next bytes of the answer."""
        self._bytes += len(data)
        data = self._rest + data
        if self._is_stream:
            end = data.rfind(_EVENT_END) + len(_EVENT_END)
            if end < len(_EVENT_END):
                end = 0 if len(data) < _LONGEST_EVENT else len(data)
            data, self._rest = data[:end], data[end:]
            self._count_events(data)
        else:
            self._rest = data[-_LONGEST_MATCH:]
        if b'_tokens"' in data:
            for is_prompt, number in _TOKENS.findall(data):
                if is_prompt:
                    self._prompt_tokens = max(self._prompt_tokens, int(number))
                else:
                    self._completion_tokens = max(self._completion_tokens, int(number))
        self._hold(max(self._held, sum(self._tokens())))

    def _count_events(self, data: bytes) -> None:
        if b'token_ids"' in data:
            for found in _TOKEN_IDS.finditer(data):
                number, begin = found[1].count(b",") + 1, found.start()
                if data.endswith(b'"', 0, begin):
                    self._ids += number
                elif data.endswith(b'"prompt_', 0, begin):
                    self._prompt_ids += number
        if not self._ids:
            self._texts += len(_TEXT.findall(data))

    def note_whole(self) -> None:
        """The answer has come to its end."""
        self._is_whole = True

    def end(self) -> None:
        """Its tokens are under way no more."""
        self._hold(0)
        self._under_way.requests -= 1

    def _hold(self, tokens: int) -> None:
        self._under_way.tokens += tokens - self._held
        self._held = tokens

    @property
    def use(self) -> Use:
        prompt, completion = self._tokens()
        return Use(
            requests=self._requests,
            prompt_tokens=prompt,
            completion_tokens=completion,
            gpu_seconds=self.gpu_seconds,
        )

    def _tokens(self) -> tuple[int, int]:
        """Return the tokens of prompt and answer, as far as they came."""
        prompt, completion = self._prompt_tokens, max(self._completion_tokens, self._ids)
        if self._is_stream:
            return prompt or self._prompt_ids or self._expected.prompt_tokens, completion or self._texts
        if self._requests and not self._is_whole and not prompt:
            most = self._expected.completion_tokens
            return self._expected.prompt_tokens, min(self._bytes // _BYTES_PER_TOKEN, most)
        return prompt, completion


def today() -> str:
    return time.strftime("%Y-%m-%d")


def file_name(day: str, gateway: str) -> str:
    return f"use-{day}-{gateway}.json"


def write_use(path: Path, people: Mapping[str, Use]) -> None:
    """Write the use of one gateway and day. Raises StoreError."""
    write_json(path, _UseFile(people=people))


def read_use(folder: Path, day: str, *, but: str = "") -> dict[str, Use]:
    """Return the use of a day by name, as the files of all gateways `but` one say. Raises StoreError."""
    total: dict[str, Use] = {}
    for name in list_folder(folder):
        if name.startswith(file_name(day, "")[:-5]) and name != but:
            with suppress(FileNotFoundError, RecordError):
                for person, use in read_json(_UseFile, folder / name).people.items():
                    total[person] = total.get(person, Use()) + use
    return total


def remove_earlier(folder: Path, day: str) -> None:
    """Remove the files of earlier days. Raises StoreError."""
    for name in list_folder(folder):
        if name.startswith("use-") and name < f"use-{day}":
            remove_file(folder / name)


# -- the keys

_KEYS_FILE = "keys.json"


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person with a key, since a time in seconds since the epoch. A limit of None is no limit."""

    name: str
    key_sha256: str
    since: Timestamp
    max_in_flight: int | None
    tokens_a_day: int | None


@dataclass(frozen=True, kw_only=True)
class _KeysFile:
    people: tuple[Person, ...]


def hash_key(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class DamagedKeysError(RecordError):
    """The file of keys holds something else, though nobody else can change it; the text says what to do."""


def read_people(folder: Path) -> tuple[Person, ...]:
    """Return the persons with a key; none without a file.

    Raises StoreError, DamagedKeysError, and RecordError if others can change the file.
    """
    path = folder / _KEYS_FILE
    try:
        return read_json(_KeysFile, path).people
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
    with lock_file(folder / f"{_KEYS_FILE}.lock"):
        people = {one.name: one for one in read_people(folder)}
        yield people
        write_json(folder / _KEYS_FILE, _KeysFile(people=tuple(people.values())))
