"""Finds which files of a model to fetch, and lets huggingface_hub bring them, until all are whole or no more come.

If the hub may not be asked, or does not answer, `cached_alone` checks whether the cache alone is enough.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, StoreError, UnknownModelError
from hpc_serve.hub.fetch.hub_repository import HubConnectionError, HubRepository
from hpc_serve.hub.hub_settings import HubSettings
from hpc_serve.hub.local_weights import missing_weights, read_index, snapshot_folder
from hpc_serve.hub.needed_files import SAFETENSORS_INDEX, RepositoryFile, has_weights, needed_files
from hpc_serve.sizes import GIB, readable_size

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
    kind = InvalidRequestError if settings.is_offline else HubConnectionError
    raise kind(f"{why}, and {settings.cache} holds {missing.words if missing else 'none'} of {name}.")


def _indexed(index: Path) -> frozenset[str]:
    try:
        return frozenset(read_index(index)["weight_map"].values())
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{index} is no index of weights: {error}.") from error
