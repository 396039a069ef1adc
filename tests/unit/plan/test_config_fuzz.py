"""What a config may hold: any other size is another answer or a refusal, and nonsense is an error in words.

The configs are those of test_config_keys.py, which have few layers, one with layers of its own, and one for each method
of quantization. Each key is changed by itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.hub.hub import find_spec
from hpc_serve.plan.catalog import architectures, models
from hpc_serve.plan.model.config import CheckedConfig, looks_like_size
from tests.support.configs import CONFIGS, EXCEPTIONS, MEASURED, PUBLISHED, built, config_of, schemes_of, with_value

LLAMA = config_of("LlamaForCausalLM")
NAS = config_of("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
NAS.update(num_hidden_layers=4, block_configs=NAS["block_configs"][:4])

SHORT_LAYERS = 6


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """A config of so many layers with fewer of them: lists that have a value for each layer, or name layers, too."""
    short: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            short[key] = shortened(value, value.get("num_hidden_layers", layers))
        elif key in ("kda_layers", "full_attn_layers"):
            short[key] = [layer for layer in value if layer <= SHORT_LAYERS]
        elif isinstance(value, list) and len(value) >= layers:
            short[key] = value[:SHORT_LAYERS]
        else:
            short[key] = min(value, SHORT_LAYERS) if key == "num_hidden_layers" else value
    return short


OTHER_NAMED = {
    name: shortened(PUBLISHED[name], PUBLISHED[name].get("num_hidden_layers", 1000))
    for name in ("DeepSeek-V4-Flash", "MiniMax-M3", "Kimi-K3", "Kimi-Linear-48B-A3B-Instruct", "Step-3.7-Flash")
}
"""Families of which config_key_effects.json has none: what transformers writes of them has other names."""

QUANTIZED_LLAMAS = [{**LLAMA, "quantization_config": quantized} for quantized in CONFIGS["quantized"]]


def configs() -> Iterator[dict[str, Any]]:
    yield from (measured["config"] for measured in MEASURED.values())
    yield NAS
    yield from OTHER_NAMED.values()
    yield from QUANTIZED_LLAMAS
    known: set[str] = set()
    for entry in models().values():
        kind = str([entry.config["architectures"], sorted(entry.config), entry.config.get("sliding_window")])
        if kind not in known:
            known.add(kind)
            yield dict(entry.config)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a config, in lists the first alone."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from paths(one, (*path, key))


def at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def other_sizes(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 64] if value > 0 else [64]
    if isinstance(value, float):
        return [2 * value]
    if isinstance(value, list):
        return [value[::-1]] if value[::-1] != value else [value[:-1]]
    return []


def test_another_size_is_another_answer_or_is_refused() -> None:
    """Of the configs that test_config_keys.py cannot compare with transformers' own models."""
    for config in (NAS, *OTHER_NAMED.values(), *QUANTIZED_LLAMAS):
        base = built(config)
        for path in paths(config):
            name, value = next(key for key in reversed(path) if isinstance(key, str)), at(config, path)
            if config in QUANTIZED_LLAMAS and path[0] != "quantization_config":
                continue
            for other in other_sizes(value) if looks_like_size(name, value) else ():
                with contextlib.suppress(InvalidRequestError):
                    after = built(with_value(config, path, other))
                    assert after != base or name in EXCEPTIONS["no_effect"][config["architectures"][0]], path


def test_every_field_that_a_family_reads_has_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a text or a list in its place would be an error of Python, as it was in fields of towers."""
    read: set[str] = set()

    def note(config: CheckedConfig, *_: Any, **__: Any) -> tuple[str, ...]:
        read.update(path.rpartition(".")[2] for path in config.read)
        return ()

    monkeypatch.setattr("hpc_serve.plan.model.architectures.check_all_read", note)
    known, without = architectures(), {about.get("layer") for about in architectures().values()}
    for config in (*configs(), *(one for one in CONFIGS.values() if "architectures" in one)):
        built(config)
        without.discard(known.get(config["architectures"][0], {}).get("layer"))
    assert without == {"special.eagle", "special.eagle3"}, "a family needs a config: put one into configs.json"
    assert {name for name in read if not is_refused(name, object())} == set(EXCEPTIONS["any_value"])


def is_refused(name: str, value: Any) -> bool:
    try:
        CheckedConfig({name: value})
    except InvalidRequestError as error:
        return f"The config's {name} is " in str(error)
    return False


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("tie_word_embeddings", "false", "true or false"),
        ("attention_bias", [], "true or false"),
        ("moe_layers_enum", "3,x", "numbers of layers, with commas between them"),
        ("moe_layers_enum", "", "numbers of layers, with commas between them"),
        ("merge_size", [], "a whole number of at least 1"),
        ("gating", {}, "true, false or a text"),
        ("layer_scale_init_value", [{}], "a number, not negative"),
        ("num_attention_heads_per_layer", [{}, 48], "a list of whole numbers"),
        ("ignore", [["lm_head"]], "a list of texts"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"config's {name} is .*: it must be {wanted}"):
        CheckedConfig({name: value})


def nested(depth: int, key: str | None = None) -> Any:
    value: Any = {} if key else []
    for _ in range(depth):
        value = {key: value} if key else [value]
    return value


CYCLE: dict[str, Any] = {}
CYCLE.update(text_config=CYCLE, vision_config=CYCLE, a=[CYCLE])
NONSENSE: list[Any] = [
    *(None, True, -1, 0, 3, 2**63, 10**400, 1.5, -2.5, 1e308, float("nan"), float("inf")),
    *("x", "4096", "", [], [1], ["a"], [None], [{}], {}, {"a": 1}, {"1": {"weights": 3}}),
    *(nested(500), nested(500, "text_config"), CYCLE),
]
TRIED = (
    *("Llama4ForConditionalGeneration", "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("DeepseekV3ForCausalLM", "NemotronHForCausalLM", "Qwen3_5MoeForConditionalGeneration", "FalconForCausalLM"),
)


def tried() -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Each config with each place in it. What is the same in all is tried in one."""
    yield from ((LLAMA, path) for path in paths(LLAMA))
    for config in (*map(config_of, TRIED), NAS, *OTHER_NAMED.values()):
        yield from ((config, path) for path in paths(config) if path[-1] not in LLAMA)
    for config in QUANTIZED_LLAMAS:
        yield from ((config, path) for path in paths(config) if path[0] == "quantization_config")


def test_nonsense_is_an_error_in_words(thinned: Any) -> None:
    refusals, places = [], thinned(tried())
    for config, path in places:
        for value in NONSENSE:
            try:
                model = built(with_value(config, path, value))
                assert model.weight_bytes >= model.parameters // 8, path
            except HpcServeError as error:
                refusals.append(str(error))
    assert len(refusals) >= (3000 if len(places) == len(list(tried())) else 3 * len(places))
    assert all(error.strip() and len(error) < 2000 for error in refusals)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["re:("], r"names modules by '\(', which this planner does not match: missing \)"),
        (["re:(\\w+)+x"], "it repeats a group"),
        (["re:(([a-z_.]+)?[a-z_.]?)+X$"], "it repeats a group"),
        (["re:" + ".*" * 20 + "X"], "or 5 parts"),
        (["*a" * 20], "or 5 parts"),
        (["re:" + "a" * 5000], "is longer than 1000 letters"),
        (["a*"] * 2000, "more than 1,000 patterns"),
    ],
)
def test_patterns_that_would_take_for_ever_are_refused(patterns: list[str], says: str) -> None:
    quantized = {"quant_method": "fp8", "ignored_layers": patterns}
    with pytest.raises(InvalidRequestError, match=says):
        built({**LLAMA, "quantization_config": quantized})


def test_many_names_of_modules_are_read() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(100) for expert in range(500)]
    quantized = {
        "quant_method": "fp8",
        "ignored_layers": [*names, "model.layers.2.self_attn", "re:.*layers\\.1\\.mlp.*"],
    }
    model = built({**LLAMA, "quantization_config": quantized})
    schemes = schemes_of(model)
    assert [one["mlp.up_proj"].name for one in schemes] == ["fp8", "bfloat16", "fp8", "fp8"]
    assert [one["self_attn.q_proj"].name for one in schemes] == ["fp8", "fp8", "bfloat16", "fp8"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"text_config":' * 100_000, "cannot be read as JSON"),
        (
            json.dumps({"architectures": ["LlamaForCausalLM"], **nested(200, "text_config")}).encode(),
            "nested too deeply",
        ),
        (b'{"architectures": ["LlamaForCausalLM"], "hidden_size": ' + b"9" * 4000 + b"}", "hidden_size is 999"),
        (b'{"architectures": ["LlamaForCausalLM"], "hidden_size": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"architectures": ["LlamaForCausalLM"], "hidden_size": NaN}', "hidden_size is nan"),
        (b'{"architectures": ["' + b"A" * 100_000 + b'"]}', "this planner does not know it"),
        (b'{"architectures": {"a": 1}}', "architectures is .* it must be a list"),
        (json.dumps({**LLAMA, **dict.fromkeys(map(str, range(20_000)), 1)}).encode(), "fields: at most 10,000"),
        (json.dumps({**NAS, "block_configs": [{}] * 20_000}).encode(), "a list of objects, at most 10,000"),
        (b'{"a": [' + b"1," * 500_000 + b"1]}", "has no architectures"),
        (b"\xff\xfe", "cannot be read as JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_a_file_of_nonsense_is_an_error_in_words(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        find_spec(str(tmp_path))
    assert len(str(caught.value)) < 3000
