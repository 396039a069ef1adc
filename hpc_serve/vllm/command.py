"""The command `vllm serve MODEL …` in a job's script: which options it may have, its layout, and what the job adds.

`data/classes.json` puts every option of the pinned version into one class: "free"; "owner" (on the command line or in
the script, not in a file of arguments: it names code or opens the engine); "ours" (the launcher sets it); "refused".
`arguments` has read them; this module decides.

A person may have edited the script, so the layout is read from this command and is told nowhere else. Options that the
pinned version does not know are passed on: the vLLM of the job may be another one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.units import layout_text, number_of
from hpc_serve.vllm.arguments import (
    ARGS_FILE,
    Argument,
    check_keys,
    check_value,
    completions,
    known_versions,
    load_data,
    names_in,
    nearest_version,
    options,
    pinned_version,
    read_arguments,
    value_of,
    without,
)

# -- which options may be used, and where they may come from

OVERRULE = "--allow-unknown-vllm-options"
"""The option of `submit` and `render` that accepts options which the pinned version does not know."""
# The launcher reads these from the engine's command line; an abbreviation would hide them.
_READ_BY_LAUNCHER = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--data-parallel-hybrid-lb"),
    *("--served-model-name", "--port", "--api-server-count", "--distributed-executor-backend"),
)


def check_arguments(words: Iterable[str], *, allow_unknown: bool, version: str = "") -> None:
    """Raise InvalidRequestError for words that the engine must not get. The value of a refused option is not repeated.

    Without `allow_unknown`, vLLM of this version must have every option and accept its value; "" is the pinned version,
    and the nearest one with data decides. With `allow_unknown`, options and values of another version pass: for the
    launcher, and if a person says so. A refused option stays refused.
    """
    version = nearest_version(version or pinned_version())
    arguments = read_arguments(words)
    for argument in arguments:
        if argument.spelling == "--":
            raise InvalidRequestError("`--` ends the options for vLLM, and the launcher adds more: leave it out.")
        _check_not_refused(argument)
        _check_no_credential(argument)
        check_keys(argument)
        option = options(version).get(argument.spelling)
        if argument.option is None or (option is None and not allow_unknown):
            _check_unknown(argument, allow_unknown, version)
        elif not allow_unknown:
            _check_value(replace(argument, option=option))
    for name, reason in load_data("classes.json")["only_one"].items():
        if (size := value_of(arguments, name)) is not None and size != 1:
            raise InvalidRequestError(f"{name} {size} cannot be given to the engine: {reason}.")


def options_of_others(words: Iterable[str], version: str) -> Iterator[tuple[str, str]]:
    """Yield the options that vLLM of this version lacks, each with a known version that has it.

    An option that no known version has is not among them.

    >>> list(options_of_others(["--monokernel", "--seed", "1", "--not-known"], "0.32.0"))
    [('--monokernel', '0.33.0')]
    """
    for argument in read_arguments(words):
        if argument.option is not None and argument.spelling not in options(nearest_version(version)):
            yield argument.spelling, _owner(argument.spelling)


def _owner(spelling: str) -> str:
    return next(version for version in reversed(known_versions()) if spelling in options(version))


def check_file_arguments(words: Iterable[str]) -> None:
    """Raise InvalidRequestError for words that a file of arguments may not hold.

    A file may hold what is "free" in the pinned version: an option that nobody has looked at could name code.
    """
    words = tuple(words)
    check_arguments(words, allow_unknown=True)
    for argument in read_arguments(words):
        if argument.option is None:
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.spelling or argument.words[0]!r}, which vLLM {pinned_version()} does not "
                "have: a file may hold only options that are known to name no code. Give it on the command line."
            )
        if reason := load_data("classes.json")["owner"].get(argument.name):
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.name}, and {reason}: give it on the command line, or in the script."
            )
        _check_free_keys(argument)


def _check_not_refused(argument: Argument) -> None:
    classes = load_data("classes.json")
    for name in (argument.name, *_meant(argument)):
        if reason := classes["ours"].get(name) or classes["refused"].get(name):
            raise InvalidRequestError(f"{name} cannot be given to the engine: {reason}.")


def _check_no_credential(argument: Argument) -> None:
    from hpc_serve.redact import holds_credential  # compiles many patterns

    if any(map(holds_credential, argument.words)):
        raise InvalidRequestError(
            f"{argument.spelling.partition('.')[0] or 'a word'} holds a password or a token, which would stand in the "
            "script and in the process list of every node: give it in a file that the engine reads, or in a variable "
            "that you export before you submit (for traces: OTEL_EXPORTER_OTLP_HEADERS)."
        )


def _meant(argument: Argument) -> tuple[str, ...]:
    """Return the options that vLLM may complete an unknown spelling to."""
    if argument.option is not None:
        return ()
    return tuple(dict.fromkeys(options()[spelling].name for spelling in completions(argument.spelling)))


def _check_unknown(argument: Argument, allow_unknown: bool, version: str) -> None:
    spelling, meant = argument.spelling, _meant(argument)
    if allow_unknown and not any(name in _READ_BY_LAUNCHER for name in meant):
        return
    if not spelling:
        raise InvalidRequestError(f"{' '.join(argument.words)!r} belongs to no option of vllm serve.")
    if meant:
        raise InvalidRequestError(
            f"{spelling} is not the full name of an option: write {' or '.join(meant[:3])}, and its value as a "
            "separate word. vLLM completes abbreviations, hpc-serve does not guess."
        )
    hint = f", {_owner(spelling)} has it" if argument.option is not None else ""
    raise InvalidRequestError(
        f"vLLM {version} has no option {spelling}{_hint(spelling) or hint} (for another version of vLLM: {OVERRULE})."
    )


def _check_value(argument: Argument) -> None:
    try:
        check_value(argument)
    except InvalidRequestError as error:
        if argument.option is not None and argument.option.choices:
            raise InvalidRequestError(f"{error} For another version of vLLM: {OVERRULE}.") from None
        raise


def _hint(spelling: str) -> str:
    if successor := load_data("classes.json")["successors"].get(spelling):
        return f": {successor}"
    near = closest_option(spelling)
    return f": did you mean {near}?" if near and near != spelling else ""


def closest_option(spelling: str, others: Iterable[str] = ()) -> str | None:
    """Return the option of `vllm serve`, or of `others`, that is closest to a misspelt one; None: none is close."""
    import difflib  # seldom needed, and never by the launcher

    return next(iter(difflib.get_close_matches(spelling, [*others, *options()], n=1, cutoff=0.75)), None)


def _check_free_keys(argument: Argument) -> None:
    free = load_data("classes.json")["free_keys"].get(argument.name)
    if free is None:
        return
    given = value_of([argument], argument.name)
    for key in given if isinstance(given, dict) else ():
        if key not in free:
            raise InvalidRequestError(
                f"{ARGS_FILE} holds {argument.name} with the key {key!r}, which may name code or a folder to write to: "
                "give it on the command line, or in the script."
            )
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{ARGS_FILE} holds {argument.name} with something that is no JSON object.")


# -- the command

Device = Literal["GPU", "TPU"]
"""What Ray calls the devices that an engine's ranks take one each of; engines on CPUs take none."""
GATE = "hpc_serve.gate.engine_gate.Gate"


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A folder that takes the place of the model's weights (HPC_SERVE_MODEL), and the words of its file.

    Raises InvalidRequestError for words that a file of arguments may not hold.
    """

    folder: str
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_file_arguments(self.args)


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """A server's command and what it says of itself. `argv` lacks only what the job alone can know.

    `takes_adapters`: adapters can be loaded while it runs, which vLLM has for one API server alone.
    """

    argv: tuple[str, ...]
    model: str
    served_model_names: tuple[str, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    port: int | None
    executor: str | None
    api_servers: int = 1
    serves_on_each_node: bool = False
    takes_adapters: bool = False
    scheduling_policy: str | None = None
    stand_in: str | None = None

    @property
    def weights(self) -> str:
        """The folder or repository of the weights: the stand-in's, or the model's own."""
        return self.stand_in or self.model

    @property
    def start(self) -> tuple[str, ...]:
        """The words up to the model that is loaded."""
        return self.argv[: self.argv.index("serve") + 2]

    @property
    def options(self) -> tuple[str, ...]:
        """The words after the model."""
        return self.argv[len(self.start) :]

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def cuts_ranks(self, num_nodes: int) -> bool:
        """Return whether each data-parallel rank is on several of so many nodes."""
        return 1 < self.data_parallel_size < num_nodes


def read_command(words: Sequence[str], *, stand_in: StandIn | None = None) -> ServeCommand:
    """Read the command after `--`. With `stand_in` the engine loads its folder and keeps the model's own names.

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
    args = tuple(words[place + 1 :])
    check_arguments(args, allow_unknown=True)
    names = value_of(read_arguments(args), "--served-model-name") or (model,)
    if stand_in:
        if "--served-model-name" not in names_in(args):
            args += ("--served-model-name", model)
        args += stand_in.args
    given = read_arguments(args)
    api_servers = value_of(given, "--api-server-count") or 1
    return ServeCommand(
        argv=(*words[:place], stand_in.folder if stand_in else model, *args),
        model=model,
        served_model_names=names,
        tensor_parallel_size=value_of(given, "--tensor-parallel-size") or 1,
        pipeline_parallel_size=value_of(given, "--pipeline-parallel-size") or 1,
        data_parallel_size=value_of(given, "--data-parallel-size") or 1,
        port=value_of(given, "--port") or None,
        executor=value_of(given, "--distributed-executor-backend"),
        api_servers=api_servers,
        serves_on_each_node=bool(value_of(given, "--data-parallel-hybrid-lb")),
        takes_adapters=bool(value_of(given, "--enable-lora")) and api_servers == 1,
        scheduling_policy=value_of(given, "--scheduling-policy"),
        stand_in=stand_in.folder if stand_in else None,
    )


def choose_backend(backend: str, command: ServeCommand, num_nodes: int) -> str:
    """Return `ray` or `mp`, vLLM's own start.

    Unless told otherwise, several nodes use Ray; one node and data-parallel ranks do not.
    """
    if backend != "auto":
        return backend
    if command.executor in ("ray", "mp"):
        return command.executor
    return "ray" if num_nodes > 1 and command.data_parallel_size == 1 else "mp"


def check_layout(command: ServeCommand, *, num_nodes: int, device: Device, per_node: int, backend: str) -> None:
    """Refuse a layout that cannot start on this allocation, or that leaves whole nodes idle. Raises DoesNotFitError."""
    data = command.data_parallel_size
    sizes = layout_text(command.tensor_parallel_size, command.pipeline_parallel_size, data, between=" x ")
    layout = f"{sizes} = {command.world_size} {device}s"
    have = f"{number_of(num_nodes, 'node')} x {per_node} {device}s"
    if num_nodes > 1 and not per_node:
        raise DoesNotFitError(
            f"The job has {num_nodes} nodes and no GPUs, and vLLM's CPU backend serves within one node: ask for one."
        )
    if num_nodes > 1 and device == "TPU" and backend != "ray":
        raise DoesNotFitError("vLLM joins the hosts of a TPU slice with Ray alone: use --backend ray, or auto.")
    if command.serves_on_each_node and (backend != "mp" or data < num_nodes or num_nodes == 1):
        raise DoesNotFitError(
            "--data-parallel-hybrid-lb has a server on each node. That needs several nodes, whole data-parallel ranks "
            f"on each, and --backend mp: the engine wants {layout}, the job has {have} and uses {backend}."
        )
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
    share, rank = command.world_size // num_nodes, command.world_size // data
    # vLLM's Ray start counts the devices of a node, not those that the ranks take of it.
    wastes_ray_devices = backend == "ray" and command.cuts_ranks(num_nodes) and share < per_node
    if (share % rank and rank % share) or wastes_ray_devices:
        raise DoesNotFitError(
            f"The engine wants {layout}, and {num_nodes} nodes x {share} of {per_node} {device}s cut a data-parallel "
            f"rank of {rank}: a node takes whole ranks, or a rank whole nodes."
        )


def server_args(command: ServeCommand, *, tls_files: tuple[str, str], shutdown_timeout_s: int = 0) -> list[str]:
    """Return the arguments of a server beside its visible command.

    vLLM binds a port at once and listens much later. It gets any port, and serves on the launcher's socket (`job`).
    `tls_files` are the files of the run's key and certificate.
    After SIGTERM the engine finishes the requests under way for `shutdown_timeout_s` seconds.
    vLLM puts each `--middleware` around those before it, so the gate, which comes last, is around all of them.
    By default vLLM starts an API server for each data-parallel rank. One server alone sees all requests, and so whether
    the engine hangs.
    """
    added = ["--host", "127.0.0.1", "--port", "0", "--middleware", GATE]
    added += ["--ssl-keyfile", tls_files[0], "--ssl-certfile", tls_files[1]]
    if shutdown_timeout_s > 0:
        added += ["--shutdown-timeout", str(shutdown_timeout_s)]
    if command.data_parallel_size > 1 and "--api-server-count" not in names_in(command.argv):
        added += ["--api-server-count", "1"]
    return added


def rank_args(
    command: ServeCommand,
    *,
    device: Device,
    backend: str,
    num_nodes: int,
    node_rank: int,
    master_address: str,
    settings_file: str,
) -> list[str]:
    """Return the arguments that tell vLLM where its ranks are. On TPUs vLLM chooses its executor.

    Over Ray one command on the head starts all ranks; vLLM puts the whole ranks of a node there, or with `span`
    (`ray_data_parallel_environ`) those that have several nodes.
    Over vLLM's own start (`mp`) every node runs one command. From the number of nodes and this node's rank vLLM infers
    which data-parallel ranks run here (engine/arg_utils.py). A node without a server is `--headless`.
    The ports at `master_address` are in the YAML file `settings_file`. On the command line every user of the node could
    read a port, and take it before the engine listens.
    """
    data, args = command.data_parallel_size, []
    if device != "TPU" and command.world_size > 1 and command.executor is None:
        args += ["--distributed-executor-backend", backend]
    if backend == "ray":
        args += ["--data-parallel-backend", "ray"] if data > 1 else []
        has_whole_ranks = num_nodes > 1 and data > 1 and not command.cuts_ranks(num_nodes)
        return args + (["--data-parallel-size-local", str(data // num_nodes)] if has_whole_ranks else [])
    if num_nodes == 1:
        return args
    args += ["--nnodes", str(num_nodes), "--node-rank", str(node_rank), "--master-addr", master_address]
    args += ["--config", settings_file]
    return args if has_server(command, node_rank) else [*args, "--headless"]


def has_server(command: ServeCommand, node_rank: int) -> bool:
    """Return whether a node of the job runs a server: the first, or with hybrid balancing every one."""
    return node_rank == 0 or command.serves_on_each_node


def ray_data_parallel_environ(command: ServeCommand, num_nodes: int) -> dict[str, str]:
    """Return vLLM's variables for data-parallel ranks over Ray that have several nodes each."""
    return {"VLLM_RAY_DP_PACK_STRATEGY": "span"} if command.cuts_ranks(num_nodes) else {}


def settings_text(command: ServeCommand, choose_port: Callable[[], int]) -> str:
    """Return the file of settings for vLLM's own multi-node start: the ports at which its processes meet."""
    names = ["master-port", "data-parallel-rpc-port"][: 1 + (command.data_parallel_size > 1)]
    return "".join(f"{name}: {choose_port()}\n" for name in names)


def headless_argv(command: ServeCommand) -> list[str]:
    """Return the command for a node without a server, which takes no number of API servers."""
    return [*command.start, *without(command.options, {"--api-server-count"})]
