"""Fetches the model files that an engine needs from the hub into the cache that jobs read.

huggingface_hub brings them, and is imported when something is fetched. `HubRepository` is a repository at one commit;
a refusal of the hub becomes an error with the next step. `ModelFiles` decides which files are fetched, and tries until
all are whole or no more come. If the hub may not be asked, or does not answer, `cached_alone` checks whether the cache
alone is enough.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError, UnknownModelError
from hpc_serve.given_files import is_plain_path
from hpc_serve.hub.local_weights import REACH_THE_HUB, HubSettings, missing_weights, read_index, snapshot_folder
from hpc_serve.hub.needed_files import SAFETENSORS_INDEX, RepositoryFile, has_weights, needed_files
from hpc_serve.units import GIB, readable_size

# -- a repository of the hub

_READ_TIMEOUT_S = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ELSEWHERE = "set HF_HOME to a folder that you can write to, here and in the site file's `env`, and"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_LEFT_AFTER_S = 3600.0
"""Seconds without a new byte after which a part of a file counts as left behind."""


class HubConnectionError(HpcServeError):
    """The hub does not answer, or the connection broke: it is worth another try."""


class HubRepository:
    """One repository, at the commit that `revision` is now.

    Raises InvalidRequestError where huggingface_hub is not installed, UnknownModelError for what the hub refuses,
    HubConnectionError where another try may help: so do its methods.
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
        warnings.filterwarnings("ignore", "Not enough free disk space")  # `check_space`, and the error, say it in words
        self.name, self.revision = name, revision
        self.page = f"{settings.endpoint}/{name}"
        self._who = "your token" if settings.token else "someone without a token"
        self._how_to_log_in = (
            f"`hf auth login` asks for a token ({settings.endpoint}/settings/tokens); HF_TOKEN holds one too."
        )
        self._hub: Any = huggingface_hub
        self._settings = settings
        where: dict[str, Any] = {"endpoint": settings.endpoint, "token": settings.token or False}
        self._api = huggingface_hub.HfApi(**where)
        self._download = partial(huggingface_hub.hf_hub_download, name, cache_dir=settings.cache, **where)
        self.folder: Path = settings.cache / ("models--" + name.replace("/", "--"))
        with self._explained():
            self.commit = str(self._api.model_info(name, revision=revision, timeout=_READ_TIMEOUT_S).sha)
        if not _COMMIT.fullmatch(self.commit):  # it becomes a folder's name
            raise UnknownModelError(f"{self.page}: the hub names {self.commit!r} as its commit, which is none.")
        self.snapshot = self.folder / "snapshots" / self.commit
        """The folder where jobs find the model."""

    def files(self) -> tuple[RepositoryFile, ...]:
        """Return all files of the commit."""
        with self._explained():
            tree = list(self._api.list_repo_tree(self.name, recursive=True, revision=self.commit))
        files = [one for one in tree if isinstance(one, self._hub.hf_api.RepoFile)]
        for one in files:
            if not is_plain_path(one.path):
                raise UnknownModelError(
                    f"{self.page} lists {one.path!r}, which would lead out of the cache. Nothing of the repository is "
                    "fetched."
                )
        return tuple(
            RepositoryFile(path=one.path, size_bytes=one.size, sha256=one.lfs.sha256 if one.lfs else None)
            for one in files
        )

    def size_of(self, file: RepositoryFile) -> int | None:
        """Return the size of a file of this commit in the cache; None if it is not there."""
        return _size_of(self.snapshot / file.path)

    def is_here(self, file: RepositoryFile) -> bool:
        """Return whether the content of a file is in the cache, perhaps as that of another commit."""
        blob = self.folder / "blobs" / (file.sha256 or "")  # huggingface_hub 2.4 names large files so
        return file.size_bytes in (self.size_of(file), _size_of(blob))

    def place(self, path: str, bars: dict[str, Any] | None = None, *, again: bool = False) -> Path:
        """Fetch a file of this commit into the cache, unless it is there; with `again`, even then.

        A progress bar that nobody sees goes into `bars`. snapshot_download is not used: it also writes down all files
        of the commit, and vLLM without a network then refuses a cache that lacks some.
        """

        class Bar(self._hub.utils.tqdm):  # type: ignore[misc,name-defined]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                if bars is not None:
                    bars[path] = self

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0

            def update_transfer(self, n: float | None = 1) -> None:
                """Xet counts bytes of the network besides, which may be packed."""

        with self._explained(path):
            if again:
                (self.snapshot / path).unlink()  # it may be a link out of the cache
            return Path(self._download(path, revision=self.commit, tqdm_class=Bar, force_download=again))

    def remove_leftovers(self) -> None:
        """Remove the parts of files that killed runs left behind: huggingface_hub continues none of another run."""
        for part in self.folder.glob("blobs/*.incomplete"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _LEFT_AFTER_S:
                    part.unlink()

    def remove_unfinished(self) -> None:
        """Remove the parts of files that this program writes now."""
        for descriptor in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                if (part := Path(os.readlink(descriptor))).suffix == ".incomplete":
                    part.unlink()

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
            raise self._unwritable(f"refs/{self.revision}", error) from error

    @contextlib.contextmanager
    def _explained(self, path: str = "") -> Iterator[None]:
        """Turn huggingface_hub's errors into ours."""
        errors = self._hub.errors
        try:
            yield
        except errors.GatedRepoError as error:
            raise UnknownModelError(
                f"{self.name} is gated, and {self._who} has no access: accept its licence at {self.page}, wait until "
                f"access is granted there, and log in with that account. {self._how_to_log_in}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UnknownModelError(f"{self.page} has no revision {self.revision!r}.") from error
        except errors.RepositoryNotFoundError as error:
            raise UnknownModelError(
                f"{self.page}: the hub has no such model, or it is private and {self._who} may not see it. "
                "Look at the name's spelling; for a private model, `hf auth login`, or set HF_TOKEN."
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise HubConnectionError(f"{self._settings.endpoint} cannot be reached: {_first_line(error)}") from error
        except errors.HfHubHTTPError as error:
            raise self._refused(error, path) from error
        except errors.HFValidationError as error:
            raise InvalidRequestError(f"{self.name!r} is no name of a model on the hub: {error}") from error
        except errors.HTTPError as error:  # of connections: all that httpx raises
            words = re.sub(r"^\[Errno -?\d+\] ", "", _first_line(error)) or type(error).__name__
            raise HubConnectionError(f"the connection to {self._settings.endpoint} failed: {words}") from error
        except (RuntimeError, OSError) as error:  # of hf_xet, and of a file that came shorter than it should
            if isinstance(error, OSError) and error.errno is not None:
                raise self._unwritable(path or self.name, error) from error
            raise HubConnectionError(f"{path or self.name}: {_first_line(error)}") from error
        except ValueError as error:  # a file of more than 50 GB, which needs hf_xet
            raise InvalidRequestError(f"{self.name}: {_first_line(error)}") from error

    def _unwritable(self, what: str, error: OSError) -> StoreError:
        cure = "make room, or raise the quota, and" if error.errno in _FULL else _ELSEWHERE
        return StoreError(
            f"{what} cannot be written to {self.folder}: {error.strerror or error}. The files that are whole are kept: "
            f"{cure} run the same command again."
        )

    def _refused(self, error: Any, path: str) -> HpcServeError:
        status = error.response.status_code
        where = f"{self.page}{f', {path}' if path else ''}: the hub answered HTTP {status}"
        if status in (401, 403):
            return UnknownModelError(f"{where}: {self._who} may not read it. {self._how_to_log_in}")
        if status in (408, 425, 429) or status >= 500:
            return HubConnectionError(where)
        return UnknownModelError(f"{where}.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


# -- the files of a model

_AT_ONCE = 4
"""Files that are fetched at once. A run that ends early loses what it has of them."""
_PAUSES_S = (1.0, 4.0, 16.0)
"""Seconds between the tries of a file. In each, huggingface_hub goes on six times after a connection that broke."""
_TICK_S = 0.25
_SPARE_BYTES = GIB // 4  # filesystems that are quite full are slow, and other programs write too


class ModelFiles:
    """The `needed` files of a model at the commit of `repository`. No engine reads the `left_out` files."""

    def __init__(
        self, repository: HubRepository, needed: tuple[RepositoryFile, ...], left_out: tuple[RepositoryFile, ...]
    ) -> None:
        self.repository, self.needed, self.left_out = repository, needed, left_out
        self.total_bytes = sum(file.size_bytes for file in needed)
        self._bars: dict[str, Any] = {}
        self._look()
        self.kept_bytes = self._here_bytes
        """Bytes of the files that were in the cache before this run."""

    @property
    def done_bytes(self) -> int:
        """Bytes that are in the cache, with those of unfinished files."""
        return min(self.total_bytes, self._here_bytes + sum(int(bar.n) for bar in list(self._bars.values())))

    @property
    def words(self) -> str:
        """The size of the needed files, the part of them in the cache, and the files left out."""
        size, kept = self.total_bytes, self.kept_bytes
        here = f", {readable_size(kept)} of it is here" if 100 * kept >= size else ""
        here = here if self.missing else ", all of it is here"
        others = sum(file.size_bytes for file in self.left_out)
        rest = f" Left out: {len(self.left_out)} files, {readable_size(others)}." if self.left_out else ""
        return (
            f"{self.repository.name}, commit {self.repository.commit[:12]}: {len(self.needed)} files, "
            f"{readable_size(size)}{here}.{rest}"
        )

    def fetch(self, on_tick: Callable[[int], None]) -> None:
        """Fetch all that is missing; `on_tick` is told every quarter of a second how many bytes are here.

        Raises StoreError where the disk refuses, HpcServeError for what the hub says. After a Ctrl-C its threads go on.
        """
        self.repository.remove_leftovers()
        pool = ThreadPoolExecutor(_AT_ONCE)
        files = [pool.submit(self._fetch_file, file) for file in self.missing]
        while running := [file for file in files if not file.done()]:
            wait(running, _TICK_S)
            on_tick(self.done_bytes)
            if any(file.exception() for file in running if file.done()):
                pool.shutdown(wait=False, cancel_futures=True)
        self._look()
        for file in files:
            if not file.cancelled():
                file.result()
        on_tick(self.done_bytes)

    def abandon(self) -> int:
        """Remove the unfinished files of this run, which no later run continues; return the bytes that stay."""
        self.repository.remove_unfinished()
        self._look()
        return self._here_bytes

    def check_space(self) -> None:
        """Raise StoreError where the cache's filesystem has no room for what is missing."""
        folder = self.repository.folder
        while not folder.exists():
            folder = folder.parent
        free, needed = shutil.disk_usage(folder).free, self.total_bytes - self._here_bytes
        if needed and free < needed + min(_SPARE_BYTES, needed):
            raise StoreError(
                f"{self.repository.name} needs {readable_size(needed)} more in {self.repository.folder.parent}, and "
                f"its filesystem has {readable_size(free)} free. Remove models there that nobody uses (`hf cache ls`), "
                "or set HF_HOME to a folder with room, here and in the site file's `env`."
            )

    def _fetch_file(self, file: RepositoryFile) -> None:
        """Fetch one file, and try again where the hub or the connection fails."""
        for pause_s in (*_PAUSES_S, None):
            try:
                is_damaged = self.repository.size_of(file) not in (None, file.size_bytes)
                self.repository.place(file.path, self._bars, again=is_damaged)
                if self.repository.size_of(file) == file.size_bytes:
                    return
                raise HubConnectionError(f"{file.path} has not the {file.size_bytes:,} bytes that the hub lists")
            except HubConnectionError as error:
                if pause_s is None:
                    raise HubConnectionError(
                        f"{str(error).rstrip('.')}. It was tried {len(_PAUSES_S) + 1} times. The files that are whole "
                        "are kept: the same command goes on from there."
                    ) from error
                time.sleep(pause_s)

    def _look(self) -> None:
        """Find out which files are missing: not here, or not whole."""
        self._bars.clear()
        self.missing = tuple(file for file in self.needed if self.repository.size_of(file) != file.size_bytes)
        absent = (file for file in self.missing if not self.repository.is_here(file))
        self._here_bytes = self.total_bytes - sum(file.size_bytes for file in absent)


def look_for_model(
    name: str, settings: HubSettings, *, revision: str = "main", include: Sequence[str] = ()
) -> ModelFiles:
    """Ask the hub what a model has. Raises UnknownModelError, InvalidRequestError, HubConnectionError, StoreError."""
    if settings.is_offline:
        raise HubConnectionError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps from the hub")
    repository = HubRepository(name, settings, revision)
    files = repository.files()
    paths = {file.path for file in files}
    # The first small file also tells whether this user may read the others: anybody may list those of gated models.
    first = next((path for path in (SAFETENSORS_INDEX, "config.json", "params.json") if path in paths), None)
    content = repository.place(first) if first is not None else None
    indexed = _indexed(content) if content is not None and first == SAFETENSORS_INDEX else frozenset()
    if missing := sorted(indexed - paths):
        raise UnknownModelError(f"{repository.page}: its index names {len(missing)} missing files ({missing[0]} …).")
    needed = needed_files(files, indexed, include=include)
    if not has_weights(needed, include=include):
        kinds = sorted({Path(path).suffix for path in paths if Path(path).suffix})
        raise UnknownModelError(
            f"{repository.page} has no weights that vLLM takes by itself (safetensors, .bin, .pt); it has "
            f"{', '.join(kinds)}. To fetch others: --include 'PATTERN'."
        )
    return ModelFiles(repository, needed, tuple(file for file in files if file not in needed))


def cached_alone(name: str, settings: HubSettings, revision: str, why: str) -> Path:
    """Return the folder of a model if the cache has all its weights; `why` says why nobody asked the hub.

    If weights are missing, raises InvalidRequestError when the hub may not be asked, else HubConnectionError.
    """
    folder = snapshot_folder(settings.cache, name, revision)
    missing = missing_weights(folder)
    if missing is None and folder is not None:
        return folder
    words = missing.words if missing else "none of its weights"
    lacks = f"{why}, and of {name} {settings.cache} holds {words}."
    if settings.is_offline:
        raise InvalidRequestError(f"{lacks} Unset these variables to fetch it.")
    raise HubConnectionError(f"{lacks} {REACH_THE_HUB}")


def _indexed(index: Path) -> frozenset[str]:
    try:
        return frozenset(read_index(index)["weight_map"].values())
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{index} is no index of weights: {error}.") from error
