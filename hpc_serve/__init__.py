"""hpc-serve: large language models as named services on a SLURM cluster.

    import hpc_serve

    client = hpc_serve.connect("405b", wait=600)     # an openai.OpenAI of the service, ready to use

connect, connect_async    a client of a service, which follows it when it moves
endpoint                  the address and the key of one replica, for other tools
services                  every service that there is, and how it is
hpc_serve.plan            which layout holds a model, and why: help(hpc_serve.plan)
hpc_serve.submit          start a model as a service: help(hpc_serve.submit)
hpc_serve.batch           answer a file of requests: help(hpc_serve.batch)
hpc_serve.bench           measure a service: help(hpc_serve.bench)
hpc_serve.errors          all errors, as one tree: help(hpc_serve.errors)

`hpc-serve --help` lists the commands. docs/reference/python-api.md has every call with an example.
Each name is imported when it is first used, so that `import hpc_serve` is quick.
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve import batch, bench, errors, plan, submit
    from hpc_serve.client import connect, connect_async, endpoint, services

__version__ = "0.1.0"
__all__ = ["batch", "bench", "connect", "connect_async", "endpoint", "errors", "plan", "services", "submit"]

if not TYPE_CHECKING:
    _OF_THE_CLIENT = ("connect", "connect_async", "endpoint", "services")
    _PLACES = {name: "client" if name in _OF_THE_CLIENT else "" for name in __all__}
    __getattr__, __dir__ = lazy_names(__name__, _PLACES)
