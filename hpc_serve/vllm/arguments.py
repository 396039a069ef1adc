"""The engine's command line: what the script shows, and the few flags that only the job can know.

The visible line is the truth: a person may have edited it, so the layout is read from it, not told beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_serve.errors import DoesNotFitError, InvalidRequestError

Device = Literal["GPU", "TPU"]
"""What Ray calls the devices that an engine's ranks take one each of; engines on CPUs take none."""
STAND_IN_ARGS = "hpc-serve-args.txt"
GATE = "hpc_serve.job.gate.Gate"


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """A server command and what it says of itself. `argv` lacks only what the job alone can know."""

    argv: tuple[str, ...]
    model: str
    served_model_names: tuple[str, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    port: int | None
    stand_in: str | None = None

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


# What would leak a secret, or take the engine out of reach of the launcher that looks after it.
_REFUSED = {
    "--api-key": "everybody on a node can read command lines; the service has a key of its own (hpc-serve env)",
    "--uds": "the service is reached by TCP",
    "--headless": "the launcher adds it where it belongs",
    "--nnodes": "the launcher adds it with --backend mp",
    "--node-rank": "the launcher adds it with --backend mp",
    "--ssl-keyfile": "TLS on the endpoint is not supported yet",
    "--ssl-certfile": "TLS on the endpoint is not supported yet",
}


def check_words(words: Iterable[str]) -> None:
    """Raises InvalidRequestError for an engine option that cannot work here; its value is not repeated."""
    for name, _ in _options(words):
        if name in _REFUSED:
            raise InvalidRequestError(f"{name} cannot be given to the engine: {_REFUSED[name]}.")


def read_command(words: Sequence[str], *, stand_in: str | None = None) -> EngineCommand:
    """The command after `--`. `stand_in` (HPC_SERVE_MODEL) is a folder that takes the place of the model's weights.

    Its `hpc-serve-args.txt`, if there, is appended; the engine goes on answering to the model's own names.
    Raises InvalidRequestError.
    """
    try:
        place = words.index("serve") + 1
        model = words[place]
    except (ValueError, IndexError):
        raise InvalidRequestError(
            f"The engine's command must be of the form `vllm serve MODEL …`, not {shlex.join(words) or 'empty'}."
        ) from None
    if model.startswith("-"):
        raise InvalidRequestError(f"The engine's command names no model after `serve`: {shlex.join(words)}.")
    check_words(words)
    argv = list(words)
    names = _values(argv, "--served-model-name") or (model,)
    if stand_in:
        argv[place] = stand_in
        if not _values(argv, "--served-model-name"):
            argv += ["--served-model-name", model]
        argv += _stand_in_args(Path(stand_in))
    return EngineCommand(
        argv=tuple(argv),
        model=model,
        served_model_names=names,
        tensor_parallel_size=_integer(argv, 1, "--tensor-parallel-size", "-tp"),
        pipeline_parallel_size=_integer(argv, 1, "--pipeline-parallel-size", "-pp"),
        port=_integer(argv, 0, "--port") or None,
        stand_in=stand_in or None,
    )


def choose_backend(backend: str, command: EngineCommand, num_nodes: int) -> str:
    """`ray` or `mp`: several nodes use Ray unless told otherwise, one node needs none."""
    if backend != "auto":
        return backend
    named = _values(command.argv, "--distributed-executor-backend")
    if named and named[-1] in ("ray", "mp"):
        return named[-1]
    return "ray" if num_nodes > 1 else "mp"


def check_layout(command: EngineCommand, *, num_nodes: int, device: Device, per_node: int, backend: str) -> None:
    """Refuse a layout that cannot start on this allocation, or that leaves whole nodes idle. Raises DoesNotFitError."""
    sizes = f"TP={command.tensor_parallel_size} x PP={command.pipeline_parallel_size}"
    layout = f"{sizes} = {command.world_size} {device}s"
    have = f"{num_nodes} node{'s' if num_nodes > 1 else ''} x {per_node} {device}s"
    if num_nodes > 1 and not per_node:
        raise DoesNotFitError(
            f"The job has {num_nodes} nodes and no GPUs, and vLLM's CPU backend serves within one node: ask for one."
        )
    if num_nodes > 1 and device == "TPU" and backend != "ray":
        raise DoesNotFitError("vLLM joins the hosts of a TPU slice with Ray alone: use --backend ray, or auto.")
    if per_node and command.world_size > num_nodes * per_node:
        raise DoesNotFitError(
            f"The engine wants {layout}, the job has {have}; ask for more nodes, or a smaller layout."
        )
    if per_node and num_nodes > 1 and command.world_size <= (num_nodes - 1) * per_node:
        raise DoesNotFitError(
            f"The engine wants {layout}, so of {have} a whole node would stay idle; ask for fewer nodes."
        )
    if num_nodes > 1 and command.world_size % num_nodes:
        raise DoesNotFitError(f"The engine wants {layout}, which {num_nodes} nodes cannot share evenly.")


def head_args(command: EngineCommand, *, host: str, port: int, device: Device, backend: str) -> list[str]:
    """What the head's engine is told beside its visible command. On TPUs vLLM chooses its executor by itself."""
    added = ["--host", host, "--middleware", GATE]
    if command.port is None:
        added += ["--port", str(port)]
    if device != "TPU" and command.world_size > 1 and not _values(command.argv, "--distributed-executor-backend"):
        added += ["--distributed-executor-backend", backend]
    return added


def multi_node_args(*, num_nodes: int, node_rank: int, master: tuple[str, int]) -> list[str]:
    """vLLM's own multi-node start (backend `mp`): one command on every node, a server on the first alone."""
    args = ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
    args += ["--master-addr", master[0], "--master-port", str(master[1])]
    return args if node_rank == 0 else [*args, "--headless"]


def _stand_in_args(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise InvalidRequestError(f"HPC_SERVE_MODEL={folder} is not a folder that this node can see.")
    try:
        return shlex.split((folder / STAND_IN_ARGS).read_text(), comments=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{folder / STAND_IN_ARGS} cannot be read as engine arguments: {error}.") from error


def _values(argv: Iterable[str], *names: str) -> tuple[str, ...]:
    """All values of an option, written `--name a b`, `--name=a`, with dashes or underscores; the last use wins."""
    found: tuple[str, ...] = ()
    for name, values in _options(argv):
        if name in names:
            found = values
    return found


def _options(argv: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    name = ""
    values: list[str] = []
    for word in argv:
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit():
            yield name, tuple(values)
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            values = [value] if equals else []
        else:
            values.append(word)
    yield name, tuple(values)


def _integer(argv: Iterable[str], default: int, *names: str) -> int:
    values = _values(argv, *names)
    if not values:
        return default
    try:
        return int(values[0])
    except ValueError:
        raise InvalidRequestError(f"{names[0]} is {values[0]!r}: it must be a whole number.") from None
