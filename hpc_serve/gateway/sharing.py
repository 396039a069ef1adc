"""The key that clients of a gateway show, and the folder of files with which another account asks the gateway.

The key is in a private file, in no command line and no log. The folder has the gateway's address, key and certificate.
Readers of the folder may ask, so its owner decides who reads it. It may be copied as a whole. The certificate is the
gateway's own and vouches for nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine.network import LOOPBACK, reachable_addresses
from hpc_serve.rendezvous.fields import host_and_port
from hpc_serve.rendezvous.files import make_folders, make_key, make_private_folder, read_key, remove_file, write_private
from hpc_serve.rendezvous.ownership import group_name, require
from hpc_serve.trust.certificates import ADDING_VARIABLE, REPLACING_VARIABLES, ensure_self_signed, with_systems

_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_ENV = """\
# How to ask this gateway, in bash or zsh: source this file. It works from a copy of its folder, too.
hpc_serve_shared="$(cd "$(dirname "${{BASH_SOURCE:-$0}}")" && pwd)"
export OPENAI_BASE_URL={url}
{key}{trust}
unset hpc_serve_shared
"""
_ENV_KEY = 'export OPENAI_API_KEY="$(cat "$hpc_serve_shared/api_key")"\n'


def default_key_file(home: Path) -> Path:
    return home / "gateway" / "api_key"


def ensure_key(path: Path) -> str:
    """Return the key in a file, and make a missing key.

    Raises RecordError (not ours alone, or no key), StoreError.
    """
    if not path.parent.is_dir():
        make_private_folder(path.parent, tighten=False)
    make_key(path)
    try:
        return read_key(path, cure="remove it to have a new one")
    except FileNotFoundError:
        raise InvalidRequestError(f"{path} was removed while it was read; start the gateway again.") from None


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The folder with `env.sh`, and a sentence on who can read it."""

    folder: Path
    readers: str


def certificate_file(home: Path) -> Path:
    """Return the private file of this host's key and certificate."""
    return make_private_folder(home / "gateway") / f"{_this_host()}.pem"


def ensure_certificate(path: Path, host: str) -> str:
    """Return the certificate of a gateway that listens on `host`, for this host's names and addresses.

    Raises as `ensure_self_signed` does.
    """
    full = socket.getfqdn()
    names = ["localhost", _this_host(), os.uname().nodename, full if full.startswith(f"{_this_host()}.") else ""]
    addresses = [LOOPBACK, "::1", *reachable_addresses()]
    (addresses if _is_address(host) else names).append(host)
    return ensure_self_signed(path, names=[name for name in names if _HOST_NAME.fullmatch(name)], addresses=addresses)


def share(folder: Path, *, host: str, port: int, key: str | None, certificate: str) -> Shared:
    """Write the files for those who ask the gateway at a host and port. A missing folder is made, for its owner alone.

    A group that may look into the folder may read the files. Without a `key`, readers need one of their own. Raises
    InvalidRequestError for a folder that everybody can look into or that others can change, and StoreError.
    """
    called = f"the folder {folder} to share"
    try:
        make_folders(folder)
        found = folder.stat()
    except OSError as error:
        raise InvalidRequestError(f"{called} cannot be made: {error.strerror}.") from error
    require(folder, "own", called=called, advice="Others could put an address of their own there.")
    if found.st_mode & stat.S_IRWXO:
        raise InvalidRequestError(
            f"{called} is open to everybody (mode {stat.S_IMODE(found.st_mode):04o}), and who reads it has the key. "
            f"Say who may: chgrp GROUP {shlex.quote(str(folder))} && chmod 2750 {shlex.quote(str(folder))}"
        )
    url = f"https://{host_and_port(_reached_by(host), port)}/v1"
    trust = [f'export {name}="$hpc_serve_shared/trusted.pem"' for name in REPLACING_VARIABLES]
    trust.append(f'export {ADDING_VARIABLE}="$hpc_serve_shared/certificate.pem"')
    files = {
        "certificate.pem": certificate,
        "trusted.pem": with_systems(certificate),
        "env.sh": _ENV.format(url=shlex.quote(url), key=_ENV_KEY if key is not None else "", trust="\n".join(trust)),
    }
    if key is not None:
        files["api_key"] = f"{key}\n"
    else:
        remove_file(folder / "api_key")
    for name, text in files.items():
        write_private(folder / name, text)
        if found.st_mode & stat.S_IRGRP:
            _open_to_group(folder / name, found.st_gid)
    has = "have the key" if key is not None else "have the address; each needs a key of their own"
    return Shared(folder=folder, readers=f"Readers of this folder {has}: {_readers(folder, found)}")


def _open_to_group(path: Path, group: int) -> None:
    try:
        os.chown(path, -1, group)
        os.chmod(path, 0o640)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be given to the folder's group: {error.strerror}.") from error


def _readers(folder: Path, found: os.stat_result) -> str:
    quoted = shlex.quote(str(folder))
    if found.st_mode & stat.S_IRGRP:
        who = f"you, group {group_name(found.st_gid)} and whom an ACL names"
    else:
        who = f"you alone; to let a group in: chgrp GROUP {quoted} && chmod 2750 {quoted}, and start the gateway again"
    closed = next((above for above in folder.parents if not above.stat().st_mode & stat.S_IXOTH), None)
    below = f" It lies below {closed}, which is not open to everybody." if closed is not None else ""
    return f"{who}.{below}"


def _reached_by(host: str) -> str:
    """Return the name or address by which others reach a gateway on `host`."""
    return os.uname().nodename if host in ("0.0.0.0", "::") else host


def _is_address(host: str) -> bool:
    return host.count(":") > 1 or host.replace(".", "").isdigit()


def _this_host() -> str:
    return socket.gethostname().partition(".")[0]
