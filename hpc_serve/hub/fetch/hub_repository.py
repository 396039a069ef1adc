"""A repository of the hub at one commit, through huggingface_hub: what it holds, its bytes, its place in the cache.

A refusal of the hub becomes an error with the next step. `download` decides which files are fetched, and how often each
is tried.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError, UnknownModelError
from hpc_serve.hub.hub_settings import HubSettings
from hpc_serve.hub.needed_files import RepositoryFile, is_plain_path

_READ_TIMEOUT_S = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ELSEWHERE = "set HF_HOME to a folder that you can write to, here and in the site file's `env`, and"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubConnectionError(HpcServeError):
    """The hub does not answer, or the connection broke: it is worth another try."""


def unwritable(folder: Path, what: str, error: OSError) -> StoreError:
    """Return the error for a cache at `folder` that cannot be written, with the next step."""
    cure = "make room, or raise the quota, and" if error.errno in _FULL else _ELSEWHERE
    return StoreError(
        f"{what} cannot be written to {folder}: {error.strerror or error}. The bytes that came are kept: {cure} run "
        "the same command again."
    )


class HubRepository:
    """One repository. Raises InvalidRequestError where huggingface_hub is not installed.

    Its methods raise UnknownModelError for what the hub refuses, HubConnectionError where another try may help.
    """

    def __init__(self, name: str, settings: HubSettings, revision: str) -> None:
        try:
            import huggingface_hub
            from huggingface_hub.utils import disable_progress_bars
            from huggingface_hub.utils import logging as hub_logging
        except ImportError as error:
            raise InvalidRequestError(
                f"huggingface_hub is not in this Python environment ({error}). The environment of the engine has it: "
                "activate that (HPC_SERVE_ENV), or `pip install huggingface_hub` into this one."
            ) from None
        disable_progress_bars()
        hub_logging.set_verbosity_error()
        self.name, self.revision = name, revision
        self.page = f"{settings.endpoint}/{name}"
        self._hub: Any = huggingface_hub
        self._settings = settings
        self._token: str | bool = settings.token or False
        self._api = huggingface_hub.HfApi(endpoint=settings.endpoint, token=self._token)
        self.folder: Path = settings.cache / ("models--" + name.replace("/", "--"))
        self.commit = ""

    def resolve(self) -> None:
        """Find out which commit the revision is now."""
        with self._explained():
            commit = str(self._api.model_info(self.name, revision=self.revision, timeout=_READ_TIMEOUT_S).sha)
        if not _COMMIT.fullmatch(commit):  # it becomes a folder's name
            raise UnknownModelError(f"{self.page}: the hub names {commit!r} as its commit, which is none.")
        self.commit = commit

    def files(self) -> tuple[RepositoryFile, ...]:
        """Return all files of the commit."""
        with self._explained():
            tree = list(self._api.list_repo_tree(self.name, recursive=True, revision=self.commit))
        files = [one for one in tree if isinstance(one, self._hub.hf_api.RepoFile)]
        for one in files:
            if not is_plain_path(one.path) or (one.lfs and not _SHA256.fullmatch(one.lfs.sha256)):
                raise UnknownModelError(
                    f"{self.page} lists {one.path!r}, and its path or SHA-256 would lead out of the cache. Nothing of "
                    "the repository is fetched."
                )
        return tuple(
            RepositoryFile(path=one.path, size_bytes=one.size, sha256=one.lfs.sha256 if one.lfs else None)
            for one in files
        )

    def has(self, file: RepositoryFile) -> bool:
        """Return whether the cache has a file of this commit, of the size that the hub says."""
        path = self.folder / "snapshots" / self.commit / file.path
        return path.is_file() and path.stat().st_size == file.size_bytes

    def forget(self, path: str) -> None:
        """Remove a file of this commit from the cache, with its content, if it is there.

        The target of a link out of the cache stays.
        """
        file = self.folder / "snapshots" / self.commit / path
        with contextlib.suppress(FileNotFoundError):
            content = file.resolve(strict=True)
            if content.parent == (self.folder / "blobs").resolve():
                content.unlink()
        file.unlink(missing_ok=True)

    def place(self, path: str) -> Path:
        """Let huggingface_hub put a file of this commit into the cache. It does not fetch a file that is in `blobs`."""
        with self._explained(path):
            return Path(
                self._hub.hf_hub_download(
                    self.name,
                    path,
                    revision=self.commit,
                    cache_dir=self._settings.cache,
                    endpoint=self._settings.endpoint,
                    token=self._token,
                )
            )

    def blob(self, sha256: str) -> Path:
        """Return the cache's path for a large file's content. Its ETag is its SHA-256, as in huggingface_hub 2.4."""
        return self.folder / "blobs" / sha256

    @contextlib.contextmanager
    def lock(self, blob: Path) -> Iterator[None]:
        """Make the folder of a blob, and hold huggingface_hub's lock on the blob."""
        path = self._settings.cache / ".locks" / self.folder.name / f"{blob.name}.lock"
        for folder in (path.parent, blob.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with self._hub.utils.WeakFileLock(path):
            yield

    @contextlib.contextmanager
    def read(self, path: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield the offset of the first byte, and the bytes from there on.

        The offset is 0 if the hub ignores `offset`.
        """
        headers = self._hub.utils.build_hf_headers(token=self._token)
        headers["Accept-Encoding"] = "identity"  # an offset counts the file's own bytes
        if offset:
            headers["Range"] = f"bytes={offset}-"
        session = self._hub.utils.get_session()
        with (
            self._explained(path),
            session.stream("GET", self._url(path), headers=headers, timeout=_READ_TIMEOUT_S) as answer,
        ):
            self._hub.utils.hf_raise_for_status(answer)
            begins_at = offset if answer.status_code == 206 else 0
            yield begins_at, answer.iter_bytes()

    def note_revision(self, *, is_whole: bool) -> None:
        """Record the commit of the revision. An older record stays until this commit `is_whole`.

        Raises StoreError.
        """
        file = self.folder / "refs" / self.revision
        if self.revision == self.commit or (file.exists() and not is_whole):
            return
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.commit)
            temporary.replace(file)
        except OSError as error:
            raise unwritable(self.folder, f"refs/{self.revision}", error) from error

    def _url(self, path: str) -> str:
        url: str = self._hub.hf_hub_url(self.name, path, revision=self.commit, endpoint=self._settings.endpoint)
        return url

    @contextlib.contextmanager
    def _explained(self, path: str = "") -> Iterator[None]:
        """Turn huggingface_hub's errors into ours."""
        errors = self._hub.errors
        try:
            yield
        except errors.GatedRepoError as error:
            raise UnknownModelError(self._gated()) from error
        except errors.RevisionNotFoundError as error:
            raise UnknownModelError(f"{self.page} has no revision {self.revision!r}.") from error
        except errors.RepositoryNotFoundError as error:
            raise UnknownModelError(
                f"{self.page}: the hub has no such model, or it is private and {self._who()} may not see it. "
                "Look at the name's spelling; for a private model, `hf auth login`, or set HF_TOKEN."
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise HubConnectionError(f"{self._settings.endpoint} cannot be reached: {_first_line(error)}") from error
        except errors.HfHubHTTPError as error:
            raise self._refused(error, path) from error
        except errors.HFValidationError as error:
            raise InvalidRequestError(f"{self.name!r} is no name of a model on the hub: {error}") from error
        except errors.HTTPError as error:  # of connections: all that httpx raises
            words = _first_line(error) or type(error).__name__
            raise HubConnectionError(f"the connection to {self._settings.endpoint} failed: {words}") from error
        except HpcServeError:
            raise
        except OSError as error:
            if error.errno is not None:  # of the disk, which is the caller's
                raise
            raise HubConnectionError(f"{path or self.name}: {_first_line(error)}") from error

    def _refused(self, error: Any, path: str) -> HpcServeError:
        status = error.response.status_code
        where = f"{self.page}{f', {path}' if path else ''}: the hub answered HTTP {status}"
        if status in (401, 403):
            return UnknownModelError(f"{where}: {self._who()} may not read it. {self._how_to_log_in()}")
        if status == 404:
            return UnknownModelError(f"{where}: there is no such file.")
        if status in (408, 425, 429) or status >= 500:
            return HubConnectionError(where)
        return UnknownModelError(f"{where}.")

    def _gated(self) -> str:
        if self._settings.token:
            return (
                f"{self.name} is gated, and {self._who()} has no access: accept its licence at {self.page} with the "
                "account of this token, wait until access is granted there, and run this again. Another account: "
                "`hf auth login`."
            )
        return (
            f"{self.name} is gated: accept its licence at {self.page}, then log in with that account. "
            f"{self._how_to_log_in()}"
        )

    def _how_to_log_in(self) -> str:
        return f"`hf auth login` asks for a token ({self._settings.endpoint}/settings/tokens); HF_TOKEN holds one too."

    def _who(self) -> str:
        return "your token" if self._settings.token else "someone without a token"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
