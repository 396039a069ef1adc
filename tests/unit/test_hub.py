"""Where a config comes from: catalogue, folder, cache, hub; and what is said when it comes from nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.hub.hub import find_model, find_spec
from hpc_serve.hub.local_weights import cached_folder
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


def cached(cache: Path, repository: str, config: object, revision: str = "0123abc") -> Path:
    """Make the snapshot of a repository in a cache, with its config alone."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


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
