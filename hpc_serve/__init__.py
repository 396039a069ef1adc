"""hpc-serve: large language models as named services on a SLURM cluster.

Planning (`hpc_serve.plan`) decides what fits where; submission (`hpc_serve.submit`) turns a plan into a job;
the job (`hpc_serve.job`) starts Ray and the engine and publishes where they are (`hpc_serve.rendezvous`);
the client (`hpc_serve.client`) finds them. Nothing is imported here, so that every command starts quickly:
`hpc_serve.connect` and `hpc_serve.connect_async` import the client when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_OF_CLIENT = ("connect", "connect_async")


def __getattr__(name: str) -> Any:
    if name not in _OF_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpc_serve.client"), name)
