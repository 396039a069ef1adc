"""What is said of a model's weights before its job is queued: in the cache of the hub, or in a folder."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import httpx
import pytest

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.hub.hub import check_access
from hpc_serve.submit.plans import preflight as weights
from hpc_serve.submit.plans.planning import plan_request
from hpc_serve.submit.plans.preflight import check_files
from hpc_serve.submit.request.options import JobSettings
from tests.support.fake_hub import cached
from tests.unit.submit.service_8b import MODEL, request, script

SHARDS = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def environ(tmp_path):
    return {"HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def snapshot(tmp_path):
    """The folder of the model in the cache: with a config, and an index of two files that are not there."""
    snapshot = cached(tmp_path / "hf" / "hub", MODEL, {})
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS))}))
    return snapshot


def said(environ, *, ask_hub: bool = False, **fields) -> str | None:
    planned = replace(plan_request(request()), request=request(**fields))
    return check_files(planned, environ, ask_hub=ask_hub)


def test_weights_that_are_all_there_need_no_word(environ, snapshot):
    for name in SHARDS:
        (snapshot / name).touch()
    assert said(environ, offline_nodes=True) is None
    for name in (*SHARDS, "model.safetensors.index.json"):
        (snapshot / name).unlink()
    (snapshot / "model.safetensors").touch()  # one file without an index
    assert said(environ, offline_nodes=True) is None


def test_what_is_missing_is_named_with_how_to_get_it(environ, snapshot):
    (snapshot / SHARDS[0]).touch()
    words = said(environ)
    assert "holds only 1 of its 2 files of weights (model-2.safetensors missing)" in words
    assert f"`hpc-serve fetch {MODEL}` (about 15 GiB)" in words
    assert "There is no token" in words
    assert "There is no token" not in said(environ | {"HF_TOKEN": "hf_secret"})
    assert "hf_secret" not in said(environ | {"HF_TOKEN": "hf_secret"})


def test_nothing_in_the_cache_is_said(environ):
    words = said(environ, weights_help="ask the help desk")
    assert f"{environ['HF_HOME']}/hub holds none of its weights, so the job fetches them first" in words
    assert words.endswith("Your site says: ask the help desk.")


@pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_job_that_could_not_fetch_them_is_refused(environ, snapshot, variable):
    offline = {variable: "1"} if variable else {}
    with pytest.raises(InvalidRequestError, match="could not fetch them") as refused:
        said(environ | offline, offline_nodes=not offline, weights_help="see /shared/models")
    assert (variable or "offline_nodes in the site file") in str(refused.value)
    assert "hpc-serve fetch" in str(refused.value)
    assert "Your site says: see /shared/models." in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [("--load-format", "dummy"), ("--load-format", "runai_streamer"), ("--download-dir", "/x"), ("--revision", "v2")],
)
def test_weights_that_are_elsewhere_are_not_looked_for(environ, words):
    assert said(environ, engine_args=words, offline_nodes=True) is None
    assert said(environ | {"HPC_SERVE_MODEL": "/x"}, offline_nodes=True) is None


def test_a_damaged_index_is_left_to_the_engine(environ, snapshot):
    (snapshot / "model.safetensors.index.json").write_text("{]")
    assert said(environ, offline_nodes=True) is None


def test_the_hub_is_asked_only_where_that_is_wanted(environ, monkeypatch):
    asked = []
    monkeypatch.setattr(weights, "check_access", lambda model, environ: asked.append(model))
    said(environ)
    assert asked == []
    said(environ, ask_hub=True)
    assert asked == [MODEL]


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (200, None, ""),
        (403, UnknownModelError, "accept its licence"),
        (404, UnknownModelError, "has no"),
        (None, InvalidRequestError, "leave --check-hub out"),
    ],
)
def test_what_the_hub_says_of_a_model(hub_answers, environ, status, error, words):
    def answer(request):
        if status is None:
            raise httpx.ConnectError("no route")
        return httpx.Response(status, json={})

    hub_answers(answer)
    with pytest.raises(error, match=words) if error else contextlib.nullcontext():
        check_access(MODEL, environ)


def test_a_folder_that_lacks_files_of_its_index_is_refused(environ, snapshot):
    (snapshot / SHARDS[1]).touch()
    planned = plan_request(request())
    planned = replace(planned, plan=replace(planned.plan, model=str(snapshot)))
    with pytest.raises(InvalidRequestError, match=r"holds only 1 of its 2 files of weights \(model-1\.safetensors"):
        check_files(planned, environ)


def test_where_nodes_are_offline_the_job_is_told(environ):
    assert "export HF_HUB_OFFLINE=1\n" in script(offline_nodes=True)
    assert "HF_HUB_OFFLINE" not in script()


def test_staging_needs_weights_that_are_here(environ):
    with pytest.raises(InvalidRequestError, match=r"--stage copies what the nodes see\. Get them first"):
        said(environ, settings=JobSettings(stage="on"))


LLAMA_TOKEN = "<|python_tag|>"
BPE = {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<|eot_id|>"}]}


def check_tools(environ, *words, tools=True, **fields):
    check_files(plan_request(request(tools=tools, engine_args=words, **fields)), environ)


class TestTokenizer:
    def test_one_without_the_parsers_token_is_refused_before_the_queue(self, environ, snapshot):
        (snapshot / "tokenizer.json").write_text(json.dumps(BPE))
        for words, tools in (((), True), (("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"), False)):
            with pytest.raises(InvalidRequestError) as refused:
                check_tools(environ, *words, tools=tools)
            assert f"llama3_json needs the token {LLAMA_TOKEN}, and the tokenizer in {snapshot} has none" in str(
                refused.value
            )
        with pytest.raises(InvalidRequestError, match="--reasoning-parser deepseek_r1 needs the token </think>"):
            check_tools(environ, "--reasoning-parser", "deepseek_r1", tools=False)
        check_tools(environ, tools=False)
        check_tools(environ, "--tool-call-parser", "hermes")

    def test_that_of_the_folder_that_stands_in_counts(self, environ, snapshot, tmp_path):
        (snapshot / "tokenizer.json").write_text(json.dumps(BPE))
        folder = tmp_path / "other"
        folder.mkdir()
        check_tools(environ | {"HPC_SERVE_MODEL": str(folder)})
        (folder / "tokenizer.json").write_text(json.dumps(BPE))
        with pytest.raises(InvalidRequestError, match=f"the tokenizer in {folder} has none"):
            check_tools(environ | {"HPC_SERVE_MODEL": str(folder)})

    @pytest.mark.parametrize(
        ("tokenizer", "config"),
        [
            (BPE | {"added_tokens": [{"content": LLAMA_TOKEN}]}, {}),
            ({"model": {"vocab": {LLAMA_TOKEN: 0}}}, {}),
            ({"model": {"type": "Unigram", "vocab": [["a", 0.0], [LLAMA_TOKEN, -1.5]]}}, {}),
            (BPE, {"added_tokens_decoder": {"7": {"content": LLAMA_TOKEN}}}),
            (BPE, {"additional_special_tokens": [LLAMA_TOKEN]}),
        ],
    )
    def test_one_that_has_it_anywhere_is_taken(self, environ, snapshot, tokenizer, config):
        (snapshot / "tokenizer.json").write_text(json.dumps(tokenizer))
        (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
        check_tools(environ)

    @pytest.mark.parametrize("text", ["{", "[]", "5", '{"model": {}}', "[" * 9_000])
    def test_one_that_cannot_be_read_is_left_to_the_engine(self, environ, snapshot, text):
        (snapshot / "tokenizer.json").write_text(text)
        check_tools(environ)

    def test_another_than_the_models_own_is_left_to_the_engine(self, environ, snapshot):
        (snapshot / "tokenizer.json").write_text(json.dumps(BPE))
        check_tools(environ, "--tokenizer", "/models/other")
        (snapshot / "tekken.json").write_text("{}")
        check_tools(environ)
