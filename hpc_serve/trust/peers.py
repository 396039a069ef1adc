"""The certificates by which the processes of one run's Ray know each other.

Each run has a separate authority in its private folder, and it goes with the folder. A certificate of another run is
therefore not accepted. Each launcher signs one certificate for its node. `job/run/ray_cluster` uses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private, write_private
from hpc_serve.trust.pem import certificates_of

_AUTHORITY = "ray_authority.pem"
_NAME = "hpc-serve run"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class PeerFiles:
    """The 0600 files that a process of the run reads: the trusted authority, its certificate, and the key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> PeerFiles:
        """Return the paths at which `make_peer_files` writes them."""
        return cls(authority=folder / "authority.pem", certificate=folder / "node.pem", key=folder / "node.key")


def make_peer_files(run_dir: Path, folder: Path, *, addresses: Iterable[str]) -> PeerFiles:
    """Make a key and a certificate for this node at `addresses` (and the loopback address), in its private `folder`.

    The run's authority is made in `run_dir` if it is missing; two nodes at once end with one. Raises StoreError,
    RecordError, or InvalidRequestError without `cryptography`.
    """
    from hpc_serve.trust import making

    authority_file = run_dir / _AUTHORITY
    if not authority_file.exists():  # it may sign for anybody, since only this run trusts it
        create_private(authority_file, making.new_authority(f"{_NAME} authority", lifetime=making.RUN_LIFETIME))
    authority = read_private(authority_file, secret=True)
    names = making.names((), (*addresses, _LOOPBACK))
    try:
        key, certificate = making.issue(authority, _NAME, names, is_for_clients=True)
    except ValueError as error:
        raise RecordError(f"{authority_file} does not hold the authority of this run: start the job again.") from error
    make_private_folder(folder)
    files = PeerFiles.in_folder(folder)
    write_private(files.authority, "".join(certificates_of(authority)))
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    return files
