"""Reads where Hugging Face's tools keep models and a token, and whether they may reach the hub.

The variables and their order are those of huggingface_hub 2.4. hub.py reads the models.

huggingface_hub itself is not used: its cache and token functions take 0.17 to 0.25 s of CPU to import on a login node,
against 0.08 s for all of hub.py, and bring hf-xet, fsspec and tqdm. A test compares the two where it is installed.
Left out: tokens of OIDC (`HF_OIDC_RESOURCE`), the renewal of OAuth tokens, and the staging endpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """`cache` is the folder of downloaded repositories; `token` is the one to send, if any, and is printed nowhere."""

    cache: Path
    endpoint: str
    is_offline: bool
    token: str | None

    def __repr__(self) -> str:
        return f"HubSettings(cache={self.cache}, endpoint={self.endpoint}, is_offline={self.is_offline})"


def read_hub_settings(environ: Mapping[str, str]) -> HubSettings:
    """Read Hugging Face's variables. An empty variable counts as unset."""
    return HubSettings(
        cache=hub_cache(environ),
        endpoint=(environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
        is_offline=_is_true(environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE")),
        token=_token(_home(environ), environ),
    )


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of downloaded repositories. It reads no file.

    >>> hub_cache({"HF_HOME": "/dev/shm/hf"}).as_posix()
    '/dev/shm/hf/hub'
    """
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return _path(cache or str(_home(environ) / "hub"), environ)


def _home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _path(environ.get("HF_HOME") or f"{base}/huggingface", environ)


def _token(home: Path, environ: Mapping[str, str]) -> str | None:
    if _is_true(environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    if token := _clean(environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or ""):
        return token
    file = _path(environ.get("HF_TOKEN_PATH") or str(home / "token"), environ)
    try:
        return _clean(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _clean(token: str) -> str | None:
    return token.replace("\r", "").replace("\n", "").strip() or None


def _is_true(value: str | None) -> bool:
    return (value or "").upper() in _TRUE


def _path(text: str, environ: Mapping[str, str]) -> Path:
    """Expand `~` and variables as os.path.expanduser and expandvars do, but with the variables of `environ`."""
    if (text == "~" or text.startswith("~/")) and environ.get("HOME"):
        text = environ["HOME"] + text[1:]
    text = os.path.expanduser(text)
    return Path(_VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), text))
