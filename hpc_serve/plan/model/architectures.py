"""Builds a model from a Hugging Face config, by what catalog/architectures.json says of its architecture.

The file names the function that describes one decoder layer, as "file.function", or describes an ordinary layer itself.
A plan loads the files of its model alone. This module adds embeddings, output head and vision tower. An architecture
that is not listed is an error that names it, never a guess.

catalog/towers.json describes each tower: its weights, and what images need while vLLM profiles memory. Each pipeline
stage holds the tower, and tensor parallelism divides it as it divides the decoder.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import architectures, load_data
from hpc_serve.plan.model.config import CheckedConfig, check_all_read, missing
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.ordinary import ordinary_layer
from hpc_serve.plan.model.quantization import quantization_from_config
from hpc_serve.plan.model.scheme import plain_scheme
from hpc_serve.plan.model.spec import Block, DecoderLayer, ImageEncoder, Linear, ModelSpec, Part, Vector, Vocabulary


def vision_tower(name: str, config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the weights of a tower and what its images need, by the model's vision_config.

    Raises InvalidRequestError where the config lacks a size, or has sizes that do not go together.
    """
    about: Mapping[str, Any] = load_data("towers.json")["towers"][name]
    sizes: dict[str, Any] = {"hidden": hidden_size}
    for size, spec in about["sizes"].items():
        sizes[size] = _size(spec, config, sizes)
    layer = [weight for row in about["layers"] for weight in _weights(row, sizes)]
    names = [f"{about['prefix']}.{index}" for index in range(sizes["count"])]
    weights = [replace(weight, name=f"{name}.{weight.name}") for name in names for weight in layer]
    weights += [weight for row in about["weights"] for weight in _weights(row, sizes)]
    images = {field: _product_sum(text, sizes) for field, text in about["images"].items()}
    return Block(weights=tuple(weights)), ImageEncoder(**images)


def _weights(row: Sequence[Any], sizes: Mapping[str, Any]) -> Iterator[Linear | Vector]:
    """Yield the weight of one row, as often as the row says."""
    name, shape, options = (*row, {})[:3]
    inputs, _, outputs = shape.partition(" -> ")
    features = [_product_sum(text, sizes) for text in (inputs, *filter(None, outputs.split(", ")))]
    for _ in range(_product_sum(options.get("times", "1"), sizes)):
        if not outputs:
            yield Vector(name=name, size=features[0])
            continue
        yield Linear(
            name=name,
            inputs=Part(features[0]),
            outputs=tuple(map(Part, features[1:])),
            split=options.get("split", "none"),
            bias=bool(_product_sum(options.get("bias", "0"), sizes)),
        )


def _size(spec: Any, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """Return one of the sizes of a tower, by the fields of its config and the sizes before it."""
    if isinstance(spec, str):
        return _product_sum(spec, sizes)
    if isinstance(spec, list):
        return _first_field(spec, config, sizes)
    if "given" in spec:
        return int(bool(sizes[spec["given"]]))
    if "length" in spec:
        return len(config.get(spec["length"]) or ())
    return spec.get(str(config.get(spec["field"]) or ""), spec["else"])


def _first_field(spec: Sequence[Any], config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    for name in spec:
        value = name
        if isinstance(name, str):
            value = _product_sum(name[1:], sizes) if name.startswith("=") else _field(name, config)
        if value is not None:
            return math.prod(value) if isinstance(value, (list, tuple)) else value
    raise missing(f"vision_config.{spec[-1]}")


def _field(path: str, config: Mapping[str, Any]) -> Any:
    *outer, last = path.split(".")
    for name in outer:
        config = config.get(name) or {}
    return config.get(last)


def _product_sum(text: str, sizes: Mapping[str, Any]) -> int:
    """Return the value of a sum of products.

    >>> _product_sum("2*width + image/patch*width", {"width": 8, "image": 30, "patch": 14})
    32
    """
    total = 0
    for term in text.split(" + "):
        first, *rest = re.split(r"([*/])", term)
        value = _number(first, sizes)
        for sign, name in zip(rest[::2], rest[1::2]):
            value = value * _number(name, sizes) if sign == "*" else _divided(value, _number(name, sizes))
        total += value
    return math.floor(total)


def _number(name: str, sizes: Mapping[str, Any]) -> Any:
    return int(name) if name.isdigit() else sizes[name]


def _divided(value: Any, by: Any) -> Any:
    if not by:
        raise InvalidRequestError("The config's vision_config has sizes that do not go together: one of them is 0.")
    return value // by if type(by) is int else round(value / by)


_PER_TOKEN = ("moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts")
"""What some families call the number of experts of a token."""
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_QUANTIZATION = ("quantization_config", "compression_config")
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_seq_length"),
    "seq_len",
)
"""Names of the longest context. The least counts, and `model_max_length` before all, as in vLLM."""
_UNSCALED = (None, "default", "mrope", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose factor is in max_position_embeddings already."""
_CLASSIFIER = "ForSequenceClassification"
_POOLING = (_CLASSIFIER, "EmbeddingModel", "Model")
"""Endings of the names of embedders and rerankers that are decoders without an output head."""


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    dtype: str = "auto",
    quantization: str | None = None,
    allow_unknown_keys: bool = False,
    is_draft: bool = False,
) -> ModelSpec:
    """Return the model of a Hugging Face config. `is_draft`: accept a draft head, which is not a model by itself.

    `dtype` and `quantization` are vLLM's options of those names. None: as the checkpoint is. Raises InvalidRequestError
    for an unknown architecture or quantization. Raises it also for an unknown field that looks like a size, unless
    `allow_unknown_keys`.
    """
    named = _known_architecture(config, name, is_draft=is_draft)
    architecture, is_pooling = _generating(named)
    about = architectures()[architecture]
    config = CheckedConfig(_flat(config))
    text: CheckedConfig = config.get("text_config") or config.get("llm_config") or config
    if about.get("decoder_by_name"):
        about = {**architectures()[_known_architecture(text, name, is_draft=False)], **about}
    is_pooling = is_pooling or about.get("runner") == "pooling"
    for own, name_read in about.get("renamed", {}).items():
        if text.get(own) is not None and text.get(name_read) is None:
            text[name_read] = text[own]
    for field, default in about.get("defaults", {}).items():
        text.setdefault(field, default)
    if "fields" in about:
        function_named(about["fields"])(text)
    chosen = _dtype(config, text, dtype)
    plain = plain_scheme(chosen)
    declared = next((found for one in (config, text) for key in _QUANTIZATION if (found := one.get(key))), None)
    scheme = quantization_from_config(declared, plain=plain, override=quantization)
    builder = LayerBuilder(text, scheme, chosen)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None:
        tied = about.get("is_tied", False)
    rows, width = builder.vocab_size, builder.hidden_size
    tower, images = Block(), None
    where = about.get("tower_config", "vision_config")
    if "tower" in about and (of_tower := config.get(where) if where else config):
        for key, default in about.get("tower_fields", {}).items():
            of_tower.setdefault(key, config.get(key, default))
        tower, images = vision_tower(about["tower"], of_tower, width)
    beside = list(about.get("beside", ()))
    if named != architecture and named.endswith(_CLASSIFIER):
        beside.append("ordinary.classifier_of_decoder")
    layers = _layers(builder, function_named(about["layer"]))
    experts, expert_size = _experts(layers)
    model = ModelSpec(
        name=name,
        architecture=named,
        dtype=chosen,
        dtype_asked=dtype not in ("auto", ""),
        hidden_size=width,
        vocab_size=rows,
        num_attention_heads=builder.heads,
        num_key_value_heads=builder.kv_heads,
        max_model_len=_max_model_len(builder),
        quantization=scheme,
        embedding=Vocabulary(name="embed_tokens", rows=rows, width=width, scheme=plain),
        layers=layers,
        final=block(builder.norms(*about.get("final_norms", ("norm",)))),
        head=None if tied or is_pooling else Vocabulary(name="lm_head", rows=rows, width=width, scheme=scheme.head),
        tower=tower,
        beside=block(*(function_named(part)(builder) for part in beside)),
        is_one_stage=about.get("is_one_stage", False),
        on_every_stage=frozenset(about.get("on_every_stage", ())),
        has_whole_shared_experts=about.get("has_whole_shared_experts", False),
        intermediate_size=builder.intermediate_size,
        rotary_bytes=_rotary_bytes(builder),
        num_experts=experts,
        num_experts_per_tok=_experts_per_token(builder, experts),
        moe_intermediate_size=expert_size or builder.intermediate_size,
        images=images,
        stored_wide=_declared_dtype(config, text) == "float32",
        prediction_layers=builder.first(*_PREDICTION, default=0),
        engine_options={"runner": "pooling"} if is_pooling else {},
    )
    if model.is_encoder:
        model = replace(model, engine_options={**model.engine_options, "takes_whole_texts": True})
    if scheme.is_assumed:
        for key in _QUANTIZATION:
            config.pop(key, None)
            text.pop(key, None)
    unknown = check_all_read(config, architecture, name=name, allow=allow_unknown_keys)
    return replace(model, unknown_keys=unknown) if unknown else model


def function_named(name: str) -> Callable[..., Any]:
    """Return the function that architectures.json names: a layer that the file describes, or file.function.

    >>> function_named("special.llama4").__name__
    'llama4'
    """
    if "." not in name:
        return partial(ordinary_layer, name=name)
    file, function = name.split(".")
    found: Callable[..., Any] = getattr(import_module(f"hpc_serve.plan.model.{file}"), function)
    return found


def _generating(architecture: str) -> tuple[str, bool]:
    """Return the architecture that a name stands for, and whether vLLM makes an embedder or a classifier of it.

    Source: `_SUFFIX_TO_DEFAULTS` in vLLM's config/model.py.

    >>> _generating("Qwen3ForSequenceClassification"), _generating("MistralModel"), _generating("LlamaForCausalLM")
    (('Qwen3ForCausalLM', True), ('MistralForCausalLM', True), ('LlamaForCausalLM', False))
    """
    if architecture not in architectures():
        for ending in _POOLING:
            decoder = architecture.removesuffix(ending) + "ForCausalLM"
            if architecture.endswith(ending) and decoder in architectures():
                return decoder, True
    return architecture, False


def _known_architecture(config: Mapping[str, Any], name: str, *, is_draft: bool) -> str:
    """Return the architecture that a config names. Raises InvalidRequestError for one that is not known."""
    architecture = _named(config)
    known = [one for one, about in architectures().items() if is_draft or not about.get("is_draft_head")]
    if last := load_data("architectures.json")["gone"].get(architecture):
        raise InvalidRequestError(
            f"{name} has the architecture {architecture}: vLLM had it until {last} and has it no more. Choose another "
            "model of its kind, as Llama 4 or Qwen3-VL for images."
        )
    if _generating(architecture)[0] not in known:
        close = difflib.get_close_matches(architecture[:80], known, n=5, cutoff=0)
        raise InvalidRequestError(
            f"{name} has the architecture {architecture[:80]}, and this planner does not know it. Of the {len(known)} "
            f"that it knows, the closest by name are {', '.join(close)}."
        )
    return architecture


def _named(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not named:
        raise InvalidRequestError('The config has no architectures: vLLM needs them, as ["LlamaForCausalLM"].')
    if not isinstance(named, (list, tuple)):
        raise InvalidRequestError(f"The config's architectures is {str(named)[:40]!r}: it must be a list.")
    return str(named[0])


def draft_from_config(config: Mapping[str, Any], *, name: str, method: str, dtype: str = "auto") -> ModelSpec:
    """Return the draft model of a config, or the head of EAGLE, which `method` says: its embedding is the model's own.

    Raises what `model_from_config` raises. Source: vLLM's transformers_utils/configs/eagle.py.
    """
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3"}.get(method, "")
    architecture = _named(config)
    if prefix and prefix not in architecture:
        architecture = f"{prefix}{architecture}"
    config = {**config, "architectures": [architecture]}
    draft = model_from_config(config, name=name, dtype=dtype, is_draft=True)
    if not prefix:
        return draft
    rows = config.get("draft_vocab_size") or draft.vocab_size
    head = Vocabulary(name="draft.lm_head", rows=rows, width=draft.hidden_size, scheme=draft.quantization.plain)
    shared = replace(draft.embedding, rows=0)
    return replace(draft, embedding=shared, head=head if prefix == "Eagle3" else None)


def _experts(layers: tuple[DecoderLayer, ...]) -> tuple[int, int]:
    """Return (routed experts of a layer, inner size of one), the most of any layer. (0, 0) without experts."""
    found = [
        (weight.copies, weight.inputs.size)
        for layer in layers
        for weight in layer.block.experts
        if weight.name.endswith("experts.down_proj")
    ]
    return max(found, default=(0, 0))


def _experts_per_token(builder: LayerBuilder, experts: int) -> int:
    """Return the routed experts that a token goes to, or 0. Raises InvalidRequestError where there are fewer."""
    chosen: int = builder.either("num_experts_per_tok", "experts_per_token", builder.first(*_PER_TOKEN, default=0))
    if experts and chosen > experts:
        raise InvalidRequestError(f"By the config a token goes to {chosen} experts (num_experts_per_tok) of {experts}.")
    return chosen if experts else 0


def _layers(builder: LayerBuilder, family: Callable[[LayerBuilder], DecoderLayer]) -> tuple[DecoderLayer, ...]:
    """Return all layers. Equal layers are one object, so that everything is computed once for them."""
    known: dict[DecoderLayer, DecoderLayer] = {}
    layers = (family(builder.layer(index)) for index in range(builder.num_layers))
    return tuple(known.setdefault(layer, layer) for layer in layers)


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the fields of its `thinker_config` beside its own, as Qwen3-ASR has them."""
    inner = config.get("thinker_config")
    own = {name: value for name, value in config.items() if name != "thinker_config"}
    return {**own, **inner} if isinstance(inner, Mapping) else config


def _dtype(config: CheckedConfig, text: CheckedConfig, asked: str) -> str:
    """Return the type that weights are loaded in: what is asked for, else the checkpoint's.

    vLLM loads float32 as bfloat16.
    """
    if asked not in ("auto", ""):
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    name = _declared_dtype(config, text)
    return "bfloat16" if name == "float32" else name


def _declared_dtype(config: CheckedConfig, text: CheckedConfig) -> str:
    """Return the type in which the checkpoint was saved, by its config."""
    declared = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype")
    return str(declared or "bfloat16").removeprefix("torch.")


def _max_model_len(builder: LayerBuilder) -> int:
    """Return the longest context the config allows: `_get_and_verify_max_len` in vLLM's config/model.py."""
    lengths = [found for key in _LENGTHS if (found := builder.get(key)) is not None]
    length: int = builder.get("model_max_length") or min(lengths, default=2048)
    scaling = builder.first("rope_scaling", "rope_parameters", default={})
    # transformers 5 may have one object for each kind of layer
    objects = [CheckedConfig(value) for value in scaling.values() if isinstance(value, Mapping)] or [scaling]
    factors = [one.get("factor") for one in objects if one.get("rope_type", one.get("type")) not in _UNSCALED]
    factor = next(filter(None, reversed(factors)), 1.0)
    return length if "gemma3" in str(builder.get("model_type")) else int(length * factor)


def _rotary_bytes(builder: LayerBuilder) -> int:
    """Return the bytes of the table of sines and cosines (`_compute_cos_sin_cache` of vLLM's rotary embeddings)."""
    if builder.config.peek("hybrid_override_pattern") or builder.config.peek("position_embedding_type") == "absolute":
        return 0
    scaling = builder.get("rope_parameters", {})
    share = builder.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    width: int = builder.first("qk_rope_head_dim", "rotary_dim", default=int(builder.head_dim * share))
    return _max_model_len(builder) * width * builder.dtype_bytes
