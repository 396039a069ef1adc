"""Finds secrets in text: keys, tokens, certificates, passwords. Logs are shown, and bug reports written, without them.

Values that are known are taken out wherever they stand; others by their form, or by the name before them. Too much is
better than too little. The writer of a report decides what goes into it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

HIDDEN = "<redacted>"
_LEAST_LENGTH = 6
_SECRET_NAME = (
    r"(?:api_?-?key|access_?-?key|secret|token(?!iz|s\b|_?ids?\b|s?_per)|passw(?:or)?d|credential|authorization|cookie|"
    r"private_?-?key)"
)
_NAMED = re.compile(
    rf"(?P<name>{_SECRET_NAME}[\w.-]{{0,64}})(?P<between>[\"']?\s*(?:=|:|\s)\s*[\"']?)(?:(?:Bearer|Basic)\s+)?"
    rf"(?P<value>[^\s\"',;)}}\]]{{{_LEAST_LENGTH},}})",
    re.IGNORECASE,
)
_NAME_OF_SECRET = re.compile(rf"{_SECRET_NAME}|pass$|_key$", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:true|false|none|null|auto|[\d.,]+|\$\{?\w+\}?)", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+[.,]?")
_NAME_OF_PATH = re.compile(r"(?:path|file|dir|folder)$", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"\b(?:Bearer|Basic)\s+[\w.~+/=-]{8,}")
_TOKEN = re.compile(r"\b(?:hf_|api_org_|sk-|nvapi-|glpat-|github_pat_|gh[pousr]_|xox[abprs]-)[\w-]{10,}")
_SHAPES = (
    re.compile(r"-----BEGIN [A-Z0-9 ]{1,64}-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL),
    _AUTHORIZATION,
    _TOKEN,
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)?"),
    re.compile(r"\b[0-9a-f]{64}\b"),
    # As the keys that hpc-serve makes: 43 characters with small and capital letters; of other lengths, with digits too.
    # Names of models and of GPUs may be as long, and have five hyphens.
    re.compile(
        r"(?<![\w/-])(?!(?:\w*-){5})(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?:(?=[\w-]*\d)[\w-]{40,}|[\w-]{43})(?![\w/-])"
    ),
)
_BASE64 = re.compile(r"[A-Za-z0-9+/=]+")
_END_OF_WORD = re.compile(r"[\w.-]+$")
_LONGEST_NAME = 64
_IN_URL = re.compile(r"(?P<scheme>\b\w{1,20}://)[^\s/@:]*:[^\s/@]+@")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without `secrets`, and without anything that looks like a secret.

    >>> redact("HF_TOKEN=hf_abcdefghijklmnop max_num_batched_tokens=8192 tokenizer='/models/8b'")
    "HF_TOKEN=<redacted> max_num_batched_tokens=8192 tokenizer='/models/8b'"
    """
    for secret in sorted({one.strip() for one in secrets}, key=len, reverse=True):
        if len(secret) >= _LEAST_LENGTH:
            for form in {secret, json.dumps(secret)[1:-1]}:
                text = text.replace(form, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _NAMED.sub(_without_value, text)


def redact_lines(lines: Iterable[str], secrets: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of a log without secrets, also without a private key that takes several lines."""
    is_in_key, known = False, tuple(secrets)
    for line in lines:
        is_in_key = is_in_key and _BASE64.fullmatch(line.rpartition(" ")[2].strip()) is not None
        yield HIDDEN if is_in_key else redact(line, known)
        is_in_key = is_in_key or ("-----BEGIN " in line and "-----END " not in line)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of an environment with names that say that they are secret."""
    return [
        value for name, value in environ.items() if _NAME_OF_SECRET.search(name) and not _NO_SECRET.fullmatch(value)
    ]


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name, or by the form of its value (a token, a URL with a
    password).

    >>> is_secret("HF_TOKEN", "hf_abc"), is_secret("HF_TOKEN_PATH", "/home/me/token"), is_secret("HF_HOME", "/scratch")
    (True, False, False)
    """
    is_path = _NAME_OF_PATH.search(name) and value.startswith(("/", "~", "$"))
    is_named = _NAME_OF_SECRET.search(name) and not is_path and not _NO_SECRET.fullmatch(value)
    return bool(is_named) or redact(value) != value


def holds_credential(word: str) -> bool:
    """Return whether a word of a command line holds what is a credential by its form alone, whatever its name.

    >>> holds_credential("http://me:word@collector:4317"), holds_credential("http://collector:4317")
    (True, False)
    """
    return any(form.search(word) for form in (_IN_URL, _AUTHORIZATION, _TOKEN))


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    # The beginning of the name is not part of the pattern: long lines without blanks would take for ever.
    before = _END_OF_WORD.search(found.string[max(0, found.start() - _LONGEST_NAME) : found.start()])
    name_begins = (before[0] if before else "") + name
    is_prose = not found["between"].strip("\"' \t") and not name_begins.startswith("-") and _WORD.fullmatch(value)
    is_path = _NAME_OF_PATH.search(name) and value.startswith("/")
    if HIDDEN in value or is_prose or is_path or _NO_SECRET.fullmatch(value):
        return found[0]
    return f"{name}{found['between']}{HIDDEN}"
