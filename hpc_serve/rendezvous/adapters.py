"""LoRA adapters of a service. `wanted.json` says which there are to be, each record which its engine has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.fields import Timestamp

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""Routes of an engine. Its gate takes them from its launcher alone."""
ONE_REPLICA_ALONE = (
    "This would change one replica of the service, until its engine starts again. For all of them, and those to come: "
    "hpc-serve adapter add SERVICE NAME FOLDER, or hpc-serve adapter remove SERVICE NAME."
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A folder with an adapter. Each one that is added has its own `added_at`, so an engine knows which it has loaded.

    In a record, `fault` says why the engine has not loaded it.
    """

    path: str
    added_at: Timestamp
    fault: str = ""


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequestError for a name that is no model's name of this kind."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} cannot name an adapter: use 1 to 63 letters, digits, dots, dashes and underscores."
        )
