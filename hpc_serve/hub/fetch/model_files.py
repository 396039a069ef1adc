"""Finds which files of a model to fetch: its files at a commit of the hub, and those missing from the cache.

If the hub may not be asked, or does not answer, it checks whether the cache alone is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.hub.fetch.download import Download
from hpc_serve.hub.fetch.hub_repository import HubConnectionError, HubRepository, unwritable
from hpc_serve.hub.hub_settings import HubSettings
from hpc_serve.hub.local_weights import missing_weights, read_index, snapshot_folder
from hpc_serve.hub.needed_files import SAFETENSORS_INDEX, RepositoryFile, has_weights, needed_files
from hpc_serve.sizes import readable_size


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The `needed` files of a model at the commit of `repository`. No engine reads the `left_out` files."""

    repository: HubRepository
    needed: tuple[RepositoryFile, ...]
    left_out: tuple[RepositoryFile, ...]
    download: Download

    @property
    def folder(self) -> Path:
        """The folder where jobs find the model."""
        return self.repository.folder / "snapshots" / self.repository.commit

    @property
    def words(self) -> str:
        """The size of the needed files, the part of them in the cache, and the files left out."""
        size, kept = self.download.total_bytes, self.download.kept_bytes
        here = f", {readable_size(kept)} of it is here" if 100 * kept >= size else ""
        here = here if self.download.num_missing else ", all of it is here"
        others = sum(file.size_bytes for file in self.left_out)
        rest = f" Left out: {len(self.left_out)} files, {readable_size(others)}." if self.left_out else ""
        return (
            f"{self.repository.name}, commit {self.repository.commit[:12]}: {len(self.needed)} files, "
            f"{readable_size(size)}{here}.{rest}"
        )


def look_for_model(
    name: str, settings: HubSettings, *, revision: str = "main", include: Sequence[str] = ()
) -> ModelFiles:
    """Ask the hub what a model has. Raises UnknownModelError, InvalidRequestError, HubConnectionError, StoreError."""
    repository = HubRepository(name, settings, revision)
    repository.resolve()
    files = repository.files()
    paths = {file.path for file in files}
    # The first small file also tells whether this user may read the others: anybody may list those of gated models.
    first = next((path for path in (SAFETENSORS_INDEX, "config.json", "params.json") if path in paths), None)
    try:
        content = repository.place(first) if first is not None else None
    except OSError as error:
        raise unwritable(repository.folder, str(first), error) from error
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
    return ModelFiles(
        repository=repository,
        needed=needed,
        left_out=tuple(file for file in files if file not in needed),
        download=Download(repository, needed),
    )


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
