"""Where a config comes from: catalogue, folder, cache, hub; and what the files of a model's weights say beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.hub.hub import find_model, find_spec, stored_weights
from hpc_serve.hub.local_weights import REACH_THE_HUB, cached_folder
from hpc_serve.plan.model.checkpoint import StoredTensor, StoredWeights, loaded_bytes
from tests.support.fake_hub import cached
from tests.unit.conftest import HubAnswers

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
TOKEN = "hf_secretsecretsecret"
Handler: TypeAlias = Callable[[httpx.Request], httpx.Response]


def answering(status: int, body: object = CONFIG, seen: list[httpx.Request] | None = None) -> Handler:
    def handle(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        return httpx.Response(status if status != 200 or request.url.path.endswith("/config.json") else 404, json=body)

    return handle


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}


def test_an_alias_is_the_repository_under_both_names() -> None:
    found = find_model("70b")
    assert found.name == "meta-llama/Llama-3.3-70B-Instruct"
    assert found.served_model_names == ("meta-llama/Llama-3.3-70B-Instruct", "70b")
    assert find_model("Meta-Llama/llama-3.3-70b-instruct").served_model_names == (found.name,)


def test_a_folder_or_a_path_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in (str(folder), str(folder / "config.json")):
        found = find_model(name)
        assert (found.name, found.served_model_names, found.config) == (str(folder), ("tiny",), CONFIG)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(("{", "cannot be read as JSON"), ("[]", "holds no JSON object"), ("\xff", "as JSON")),
        (" " * 11 * 2**20, "it is longer than 10,485,760 bytes"),
    ],
    ids=["half", "list", "no text", "huge"],
)
def test_a_broken_config_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequestError, match=says):
        find_model(str(tmp_path))


def test_the_cache_is_looked_in_before_the_hub(hub_answers: HubAnswers, environ: dict[str, str]) -> None:
    snapshot = cached(Path(environ["HF_HOME"]) / "hub", "acme/rocket-7b", CONFIG)
    hub_answers(answering(500))
    found = find_model("acme/rocket-7b", environ=environ)
    assert (found.config, found.folder, found.name) == (CONFIG, snapshot, "acme/rocket-7b")
    elsewhere = {"HF_HUB_CACHE": str(Path(environ["HF_HOME"]) / "hub"), "HF_HOME": "/nowhere"}
    assert cached_folder("acme/rocket-7b", elsewhere) == snapshot
    assert cached_folder("acme/other", environ) is None


@pytest.mark.parametrize("endpoint", ["https://huggingface.co", "https://mirror.example/"])
def test_the_hub_is_asked_with_the_token_in_its_header_alone(hub_answers, environ, endpoint):
    seen: list[httpx.Request] = []
    own = {"HF_ENDPOINT": endpoint} if "mirror" in endpoint else {"HF_TOKEN": TOKEN}
    if "HF_TOKEN" not in own:
        Path(environ["HF_HOME"]).mkdir()
        (Path(environ["HF_HOME"]) / "token").write_text(TOKEN + "\n")
    hub_answers(answering(200, seen=seen))
    found = find_model("acme/rocket-7b", environ={**environ, **own})
    assert found.config == CONFIG
    assert str(seen[0].url) == f"{endpoint.rstrip('/')}/acme/rocket-7b/resolve/main/config.json"
    assert seen[0].headers["Authorization"] == f"Bearer {TOKEN}"


def test_the_token_does_not_follow_a_redirect_to_another_host(hub_answers: HubAnswers, environ: dict[str, str]) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/hf_quant_config.json"):
            return httpx.Response(404)
        seen.append(request)
        if request.url.host == "huggingface.co":
            return httpx.Response(302, headers={"Location": "https://cdn.example/config.json"})
        return httpx.Response(200, json=CONFIG)

    hub_answers(handle)
    find_model("acme/x", environ={**environ, "HF_TOKEN": TOKEN})
    assert [request.url.host for request in seen] == ["huggingface.co", "cdn.example"]
    assert "Authorization" not in seen[1].headers


@pytest.mark.parametrize(
    ("status", "token", "says"),
    [
        (401, None, "set HF_TOKEN to a token"),
        (403, TOKEN, "your HF_TOKEN may not read it"),
        (404, None, "has no acme/rocket-7b"),
        (503, None, "answered HTTP 503"),
    ],
)
def test_what_the_hub_refuses(hub_answers, environ, status, token, says):
    hub_answers(answering(status))
    with pytest.raises(UnknownModelError, match=says) as caught:
        find_model("acme/rocket-7b", environ=environ | ({"HF_TOKEN": token} if token else {}))
    assert TOKEN not in str(caught.value)


def test_without_a_network(hub_answers: HubAnswers, environ: dict[str, str]) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(f"no route; {request.headers}")

    environ["HF_TOKEN"] = TOKEN
    hub_answers(handle)
    with pytest.raises(UnknownModelError, match="cannot be reached") as caught:
        find_model("acme/rocket-7b", environ=environ)
    assert (TOKEN in str(caught.value), caught.value.__cause__) == (False, None)
    assert REACH_THE_HUB in str(caught.value)
    assert str(caught.value).count("config.json") == 1
    hub_answers(answering(200))
    with pytest.raises(UnknownModelError, match="HF_HUB_OFFLINE"):
        find_model("acme/rocket-7b", environ={**environ, "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("405", "Did you mean 405b"),
        ("meta-llama/Llama-3.1-70B-Instrukt", r"meta-llama/Llama-3\.1-70B-Instruct"),
        ("{folder}", r"no config\.json"),
        ("{folder}/missing", "no folder or file"),
    ],
)
def test_names_that_are_nothing_are_said_with_a_suggestion(hub_answers, environ, tmp_path, name, says):
    hub_answers(answering(404))
    with pytest.raises(UnknownModelError, match=says):
        find_model(name.format(folder=tmp_path), environ=environ)


TINY: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
TINY |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The folder of a small model, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "group_size": None, "exclude_modules": ["lm_head"]}
SIDECAR = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": FP8}


def test_modelopts_file_beside_the_config_says_how_it_is_quantized(tiny: Path, environ: dict[str, str]) -> None:
    """As vLLM's `get_config` reads it: only where the config itself says nothing."""
    assert find_spec(str(tiny))[1].quantization.method == "none"
    (tiny / "hf_quant_config.json").write_text(json.dumps(SIDECAR))
    found = find_spec(str(tiny))[1].quantization
    assert (found.method, found.linear.name, found.kv_cache_dtype) == ("modelopt", "fp8", "fp8")
    assert found.skipped == ("lm_head",)
    snapshot = cached(Path(environ["HF_HOME"]) / "hub", "acme/rocket-8b", TINY)
    (snapshot / "hf_quant_config.json").write_text(json.dumps(SIDECAR))
    assert find_spec("acme/rocket-8b", environ=environ)[1].quantization.method == "modelopt"
    (tiny / "config.json").write_text(json.dumps(TINY | {"quantization_config": {"quant_method": "fp8"}}))
    assert find_spec(str(tiny))[1].quantization.method == "fp8"


def test_the_hub_is_asked_for_modelopts_file(hub_answers: HubAnswers, environ: dict[str, str]) -> None:
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(200, json=SIDECAR if "quant" in request.url.path else TINY)

    hub_answers(handle)
    assert find_spec("acme/rocket-8b", environ=environ)[1].quantization.method == "modelopt"
    assert seen == [f"/acme/rocket-8b/resolve/main/{file}" for file in ("config.json", "hf_quant_config.json")]


def safetensors(file: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    file.write_bytes(with_header(header))


def test_headers_of_weights(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    safetensors(tmp_path / "a.safetensors", {"x": ("BF16", [4, 8], 64), "y": ("F32", [3], 12)})
    safetensors(tmp_path / "b.safetensors", {"z": ("F8_E4M3", [16, 16], 256)})
    stored = stored_weights(tmp_path)
    assert stored is not None
    assert stored.tensors == (
        StoredTensor(name="x", dtype="BF16", elements=32, size_bytes=64),
        StoredTensor(name="y", dtype="F32", elements=3, size_bytes=12),
        StoredTensor(name="z", dtype="F8_E4M3", elements=256, size_bytes=256),
    )


def tiny_tensors(dtype: str = "BF16", size: int = 2) -> dict[str, tuple[str, list[int], int]]:
    shapes = {"model.embed_tokens.weight": [512, 256], "model.norm.weight": [256], "lm_head.weight": [512, 256]}
    for layer in range(5):  # the last is beyond the config: multi-token prediction, which vLLM does not load
        for names, shape in (
            (("self_attn.q_proj", "self_attn.o_proj"), [256, 256]),
            (("self_attn.k_proj", "self_attn.v_proj"), [128, 256]),
            (("mlp.gate_proj", "mlp.up_proj"), [512, 256]),
            (("mlp.down_proj",), [256, 512]),
            (("input_layernorm", "post_attention_layernorm"), [256]),
        ):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name in names}
    return {name: (dtype, shape, math.prod(shape) * size) for name, shape in shapes.items()}


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F32", 4)])
def test_files_that_agree_with_the_config(tiny: Path, dtype: str, size: int) -> None:
    """A tied head and a further layer are in the files and not loaded; 32 bit becomes 16."""
    safetensors(tiny / "model.safetensors", tiny_tensors(dtype, size))
    found, spec, _ = find_spec(str(tiny))
    assert found.warning is None
    assert spec.weight_bytes == 2 * spec.parameters == 2 * (512 * 256 + 4 * (9 * 256 * 256 + 512) + 256)


def test_files_that_are_heavier_are_believed(tiny: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.0.extra"] = ("BF16", [512, 1024], 512 * 1024 * 2)
    safetensors(tiny / "model.safetensors", tensors)
    found, spec, _ = find_spec(str(tiny))
    assert found.warning is not None
    assert "the plan uses the size of the files" in found.warning
    assert spec.weight_bytes == pytest.approx(2 * (2_493_696 + 512 * 1024), rel=0.03)


def test_an_index_without_its_files_decides_too(tiny: Path) -> None:
    names = dict.fromkeys(("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"), "a.safetensors")
    weight_bytes = 2 * find_spec(str(tiny))[1].parameters

    def warning(total: object, *, extra: str = "model.norm.weight") -> str | None:
        index = {"metadata": {"total_size": total}, "weight_map": {**names, extra: "a.safetensors"}}
        (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
        return find_spec(str(tiny))[0].warning

    assert warning(weight_bytes) is None
    assert "the plan uses the size of the files" in str(warning(2 * weight_bytes))
    assert warning(2 * weight_bytes, extra="model.layers.7.mlp.up_proj.weight") is None  # not loaded, of unknown size
    for nonsense in (None, "x", -1, True, [1]):
        assert warning(nonsense) is None


def test_scales_that_bitsandbytes_quantized_twice_are_loaded_in_32_bit() -> None:
    spec = find_spec("8b")[1]
    stored = {"": ("U8", 512), ".absmax": ("U8", 16), ".quant_state.bitsandbytes__nf4": ("U8", 90)}
    stored |= {".nested_absmax": ("F32", 1), ".nested_quant_map": ("F32", 256), ".quant_map": ("F32", 16)}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = [
        StoredTensor(name=f"{name}{end}", dtype=dtype, elements=count, size_bytes=count * (4 if dtype == "F32" else 1))
        for end, (dtype, count) in stored.items()
    ]
    assert loaded_bytes(tensors, spec) == 512 + 4 * 16


def test_an_index_whose_files_are_not_all_there(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", {"x": ("BF16", [4], 8)})
    index = {"weight_map": {"x": "a.safetensors", "y": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_weights(tmp_path) == StoredWeights(names=("x", "y"))


def with_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text  # the header alone: weights are never read


INDEX = "model.safetensors.index.json"
WRONG_ENTRIES: tuple[Any, ...] = (
    *({}, [], {"dtype": "BF16", "shape": [4], "data_offsets": [0]}, {"dtype": "BF16"}),
    {"dtype": "BF16", "shape": ["a"], "data_offsets": [0, 8]},
)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *(
            ("a.safetensors", content, r"a\.safetensors")
            for content in (b"", b"\xff" * 16, b"\5" + b"\0" * 7 + b'{"a":')
        ),
        *(("a.safetensors", with_header({"x": entry}), "is damaged: .* what 'x' is") for entry in WRONG_ENTRIES),
        *(
            (INDEX, json.dumps({"weight_map": {"x": name}}).encode(), "not below the model's folder")
            for name in ("../outside.safetensors", "/etc/passwd")
        ),
        *((INDEX, content, "no weight_map") for content in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"x": 3}}')),
    ],
)
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"mine")
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=says):
        stored_weights(folder)
