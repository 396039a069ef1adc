"""Lists the layouts to choose from, preferred ones first, and turns a layout into options of `vllm serve` and back.

Tensor parallelism stays within a node, pipeline parallelism goes across nodes. A layout on several nodes leaves no GPU
idle. Data-parallel ranks of one engine each have TP x PP GPUs and requests of their own; they share the experts.

People and the pinned vLLM name some quantization methods differently: this module matches the names, and says what a
plan assumes about the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.engine import LAYOUT_SIZES, PINNED_VERSION, EngineConfig
from hpc_serve.plan.hardware import ClusterSpec, is_offered, slice_with
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.units import layout_text, number_of
from hpc_serve.vllm.arguments import load_data, read_arguments, value_of

_MAX_NODES = 64
"""The search for a layout stops at this number of nodes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks of one engine, and the number of nodes that share them evenly.

    `data_parallel_size` above 1: so many groups of TP x PP ranks hold requests of their own, and share the experts.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_nodes: int = 1
    data_parallel_size: int = 1

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def gpus_per_node(self) -> int:
        """GPUs used on each node."""
        return -(-self.num_gpus // self.num_nodes)

    def sizes(self, between: str = " ") -> str:
        """Return the sizes for a person, as `TP=8 PP=2`."""
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        return layout_text(*sizes, between=between)

    @property
    def cuts_ranks(self) -> bool:
        """Whether a node has a part of one data-parallel rank and a part of another. vLLM refuses such a layout."""
        rank = self.num_gpus // self.data_parallel_size
        return bool(self.gpus_per_node % rank and rank % self.gpus_per_node)

    @property
    def splits_layers_across_nodes(self) -> bool:
        """Whether the all-reduces of each layer go over the network."""
        return self.tensor_parallel_size > self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.sizes()} ({number_of(self.num_nodes, 'node')} x {self.gpus_per_node})"


def layouts(cluster: ClusterSpec, engine: EngineConfig) -> Iterator[Layout]:
    """Yield layouts, from the smallest number of nodes and GPUs on. Sizes that were asked for are kept.

    Raises DoesNotFitError where the sizes asked for cannot be laid on the nodes asked for.
    """
    if cluster.accelerator.kind == "cpu" and (cluster.num_nodes or 1) > 1:
        raise DoesNotFitError(
            "vLLM's CPU backend serves within one node (its ranks talk through shared memory): leave out --nodes, "
            "or start one service a node."
        )
    if engine.tensor_parallel_size and engine.pipeline_parallel_size:
        sizes = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size or 1
        yield _layout_asked_for(*sizes, cluster)
        return
    found = False
    for nodes in [cluster.num_nodes] if cluster.num_nodes else range(1, _most_nodes(cluster) + 1):
        for layout in layouts_on(nodes, cluster, engine):
            found = True
            yield layout
    if not found and engine.has_asked_layout:
        raise DoesNotFitError(_no_layout_text(cluster, engine))


def without_layout(engine: EngineConfig) -> EngineConfig:
    """Return the options without the sizes of a layout."""
    return replace(engine, tensor_parallel_size=None, pipeline_parallel_size=None, data_parallel_size=None)


def data_parallel_layouts(num_nodes: int, cluster: ClusterSpec, engine: EngineConfig) -> Iterator[Layout]:
    """Yield the layouts on all GPUs of so many nodes with data-parallel ranks that share experts, without stages.

    A tensor-parallel group stays within a node. Yield none if a size of data parallelism or stages were asked for.
    """
    if engine.data_parallel_size or (engine.pipeline_parallel_size or 1) > 1:
        return
    node_size = cluster.node_size_of(num_nodes)
    for tensor in reversed(_divisors(node_size)):
        ranks = num_nodes * node_size // tensor
        if ranks > 1 and engine.tensor_parallel_size in (None, tensor):
            yield Layout(
                tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size=ranks, num_nodes=num_nodes
            )


def _no_layout_text(cluster: ClusterSpec, engine: EngineConfig) -> str:
    """Say why there is no layout with the sizes that were asked for."""
    named = (
        ("DP", "--data-parallel-size", engine.data_parallel_size),
        ("TP", "--tensor-parallel-size", engine.tensor_parallel_size),
        ("PP", "--pipeline-parallel-size", engine.pipeline_parallel_size),
    )
    given = [one for one in named if one[2]]
    asked, option = " x ".join(f"{name}={size}" for name, _, size in given), given[-1][1]
    nodes = cluster.num_nodes or _most_nodes(cluster)
    most = nodes * cluster.node_size_of(nodes)
    places = f"{number_of(nodes, 'node')} x {cluster.node_size_of(nodes)}"
    places = places if cluster.num_nodes else f"{places}, the most that are looked at"
    unit = f"{cluster.accelerator.unit}s"
    if math.prod(size or 1 for _, _, size in given) > most:
        return f"{asked} takes more than the {most} {unit} there are ({places}); leave out {option}, or ask for less."
    return (
        f"{asked} does not divide the {most} {unit} there are ({places}); leave out {option}, use another number, "
        f"or give {'all' if engine.data_parallel_size else 'both'} sizes."
    )


def _most_nodes(cluster: ClusterSpec) -> int:
    return 1 if cluster.accelerator.kind == "cpu" else _MAX_NODES


def layouts_on(num_nodes: int, cluster: ClusterSpec, engine: EngineConfig) -> Iterator[Layout]:
    """Yield layouts on exactly so many nodes. One node may be used in part, several nodes are used whole.

    Links between TPU chips span hosts, and tensor-parallel groups do too. Several TPU hosts are an offered slice.
    """
    seen = set()
    data = engine.data_parallel_size or 1
    is_tpu = cluster.accelerator.kind == "tpu"
    node_size = cluster.node_size_of(num_nodes)
    if num_nodes > 1 and not cluster.gpus_per_node and not is_offered(cluster.accelerator, num_nodes * node_size):
        return
    for gpus in _divisors(node_size) if num_nodes == 1 and not cluster.is_whole else [node_size]:
        total, rest = divmod(num_nodes * gpus, data)
        if rest:
            continue
        for tensor, pipeline in _splits(total, total if is_tpu else math.gcd(total, gpus), engine):
            if is_tpu and num_nodes > 1 and pipeline not in (1, num_nodes):
                continue  # a stage is a host: tpu-inference's Ray executor takes no other number of them
            used, rest = divmod(tensor * pipeline * data, num_nodes)
            if rest or used > node_size or (tensor, pipeline) in seen:
                continue
            seen.add((tensor, pipeline))
            layout = Layout(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                data_parallel_size=data,
                num_nodes=num_nodes,
            )
            if not (layout.cuts_ranks or _leaves_asked_gpus_idle(layout, cluster)):
                yield layout


def _splits(total: int, node_size: int, engine: EngineConfig) -> Iterator[tuple[int, int]]:
    """Yield (TP, PP) of `total` ranks. The largest TP that stays within a node comes first."""
    tensor, pipeline = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if pipeline:
        if total % pipeline == 0 and tensor in (None, total // pipeline):
            yield total // pipeline, pipeline
        return
    if tensor is None:
        for width in reversed(_divisors(node_size)):
            yield width, total // width
    elif tensor > node_size:
        if total % tensor == 0:
            yield tensor, total // tensor
    else:
        yield tensor, (node_size // tensor) * (total // node_size)


def _layout_asked_for(tensor: int, pipeline: int, data: int, cluster: ClusterSpec) -> Layout:
    """Return the layout with the sizes as asked for.

    Raises DoesNotFitError if the nodes cannot hold the ranks or share them evenly.
    """
    ranks = tensor * pipeline * data
    nodes = cluster.num_nodes or _fewest_nodes(ranks, cluster) or 1
    size = cluster.node_size_of(nodes)
    asked = f"{layout_text(tensor, pipeline, data, between=' x ')} is {ranks} ranks"
    if ranks > nodes * size or ranks % nodes:
        why = f"which {nodes} nodes cannot share evenly"
        if ranks > nodes * size:
            why = f"but {nodes} x {size} {cluster.accelerator.unit}s are {nodes * size}"
        raise DoesNotFitError(f"{asked}, {why}: it does not fit.")
    layout = Layout(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data, num_nodes=nodes
    )
    if layout.cuts_ranks:
        raise DoesNotFitError(
            f"{asked}, and {nodes} nodes x {ranks // nodes} cut a data-parallel rank of {tensor * pipeline}: vLLM "
            "takes whole ranks on a node, or whole nodes for a rank; use other sizes."
        )
    if _leaves_asked_gpus_idle(layout, cluster):
        raise DoesNotFitError(_too_many_gpus(layout, cluster))
    return layout


def _leaves_asked_gpus_idle(layout: Layout, cluster: ClusterSpec) -> bool:
    """Return whether GPUs that were asked for by number would stay idle: a job takes several nodes, or a slice,
    whole."""
    is_asked_for = cluster.num_nodes is not None and cluster.gpus_per_node is not None
    takes_all = layout.num_nodes > 1 or cluster.is_whole
    return is_asked_for and takes_all and layout.gpus_per_node < cluster.node_size_of(layout.num_nodes)


def _too_many_gpus(layout: Layout, cluster: ClusterSpec) -> str:
    """Return how many GPUs would stay idle, and what to write instead."""
    ranks = layout.num_gpus
    stage = ranks // layout.pipeline_parallel_size
    device, nodes, size = cluster.accelerator, layout.num_nodes, cluster.node_size_of(layout.num_nodes)
    instead = []
    if nodes * size % stage == 0:
        instead.append(f"--pipeline-parallel-size {nodes * size // stage} to use all")
    if device.kind == "cpu":
        instead.append(f"--gpu {device.name}-{ranks}s")
    elif cluster.is_whole:
        instead += [f"--gpu {device.name}:{topology}" for topology in [slice_with(device, ranks)] if topology]
    else:
        instead += [f"--nodes {-(-ranks // size)}"] if ranks <= size or ranks % size == 0 else []
        instead.append(f"--gpus-per-node {layout.gpus_per_node} to use as many of each node")
    sizes = f"{layout.sizes(' x ')} is {number_of(ranks, 'rank')}"
    places = f"{number_of(nodes, 'node')} x {size} {device.unit}s are {nodes * size}"
    return f"{sizes}, but {places}: {nodes * size - ranks} would stay idle; use {', or '.join(instead)}."


def _fewest_nodes(ranks: int, cluster: ClusterSpec) -> int | None:
    """Return the fewest nodes that share so many ranks evenly, or None."""
    numbers = range(1, _most_nodes(cluster) + 1)
    return next((one for one in numbers if ranks % one == 0 and ranks <= one * cluster.node_size_of(one)), None)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


# -- options of `vllm serve`

_NOT_VLLMS = ("vllm_version", "use_v1", "uncounted", "takes_whole_texts")
_ORDER = (
    *(("int | None", "float | None", "str | None"), ("str",), ("quantization",), ("bool", "bool | None")),
    *(("Mapping[str, Any] | None",), ("tuple[str, ...] | None",)),
)
"""Types of options in the order in which they are written. --quantization stands among them by its name."""
_OPTIONS = [
    option
    for types in _ORDER
    for option in fields(EngineConfig)
    if option.name not in _NOT_VLLMS and ("quantization" if option.name == "quantization" else option.type) in types
]
_FIELDS = ("max_model_len", *(option.name for option in _OPTIONS))
"""The options that decide about memory and layout: the fields of EngineConfig, and the context."""
_ONLINE_METHODS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only", "mxfp8")
"""Methods with which vLLM 0.32 quantizes a 16-bit checkpoint while it loads it. `fp8` is its first."""


def vllm_args(layout: Layout, max_model_len: int, engine: EngineConfig, model: ModelSpec) -> tuple[str, ...]:
    """Return the options after the model: the layout, the context, and what the engine was asked for."""
    args = [
        *("--tensor-parallel-size", str(layout.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(layout.pipeline_parallel_size)),
        *("--max-model-len", str(max_model_len)),
    ]
    if layout.data_parallel_size > 1:
        args += ["--data-parallel-size", str(layout.data_parallel_size)]
    if model.quantization.method == "fbgemm_fp8" and not model.quantization.is_assumed:
        args += ["--allow-deprecated-quantization"] if engine.is_at_least(PINNED_VERSION) else []
    of_plan = {**dict.fromkeys(LAYOUT_SIZES), "quantization": _quantization_flag(engine, model)}
    for option in _OPTIONS:
        value = of_plan[option.name] if option.name in of_plan else getattr(engine, option.name)
        args += _words(option.name, value, option.default)
    return tuple(args)


def _words(name: str, value: Any, default: Any) -> list[str]:
    """Return an option of `vllm serve` with its value. Empty for vLLM's default, and for an empty list or object."""
    if value is None or value == default or value in ({}, ()):
        return []
    if isinstance(value, bool):
        return [_flag(name if value else f"no_{name}")]
    if isinstance(value, tuple):
        return [_flag(name), *value]
    return [_flag(name), json.dumps(value) if isinstance(value, Mapping) else str(value)]


def read_fields(words: Iterable[str]) -> dict[str, Any]:
    """Return the options of `vllm serve` for memory and layout, by EngineConfig's names and `max_model_len`.

    `uncounted` are the options given that may change memory or speed, and that no figure counts
    (vllm/data/uncounted.json). Raises InvalidRequestError for a context that vLLM is to choose itself, and for values
    of another version of vLLM.

    >>> read_fields(["--max-num-seqs=16", "-tp", "2", "--seed", "1", "--enforce-eager"])
    {'tensor_parallel_size': 2, 'max_num_seqs': 16, 'enforce_eager': True}
    """
    arguments = read_arguments(words)
    try:
        values = {name: value_of(arguments, _flag(name)) for name in _FIELDS}
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error} The plan is made with it, so hpc-serve must know it.") from None
    if values["max_model_len"] == -1:
        raise InvalidRequestError(
            "--max-model-len auto lets vLLM choose the context, and the plan needs it: write a number of tokens."
        )
    given, uncounted = {argument.name for argument in arguments}, load_data("uncounted.json")["uncounted"]
    values["uncounted"] = tuple(name for name in uncounted if name in given) or None
    return {name: value for name, value in values.items() if value is not None}


def assumption(engine: EngineConfig, model: ModelSpec) -> str | None:
    """Return a sentence on what the plan assumes about quantization that the checkpoint does not have.

    None: nothing.
    """
    if engine.quantization is None or not model.quantization.is_assumed:
        return None
    if _quantization_flag(engine, model):
        found = model.quantization
        if found.linear == found.plain:
            return f"vLLM quantises the experts to {found.experts.name} while it loads them, and nothing else."
        return f"vLLM quantises the 16-bit checkpoint to {found.linear.name} while it loads it."
    text = f"Sized as if {model.name} were quantised with {engine.quantization}: serve a checkpoint that is."
    if model.quantization.method == "bitsandbytes" and engine.version >= (0, 32):
        text += " vLLM 0.32 no longer has bitsandbytes."
    return text


def is_quantized_by_vllm(engine: EngineConfig, model: ModelSpec) -> bool:
    """Return whether vLLM loads the checkpoint with this quantization: the checkpoint has it, or vLLM makes it
    itself."""
    return not model.quantization.is_assumed or _quantization_flag(engine, model) is not None


def _quantization_flag(engine: EngineConfig, model: ModelSpec) -> str | None:
    """Return the value of --quantization. None where the checkpoint says it, or where another checkpoint is needed."""
    found = model.quantization
    if engine.quantization is None or not found.is_assumed:
        return engine.quantization
    method = engine.quantization.lower().replace("-", "_")
    method = "fp8_per_tensor" if method == "fp8" else method
    return method if found.is_of_16_bit and method in _ONLINE_METHODS else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
