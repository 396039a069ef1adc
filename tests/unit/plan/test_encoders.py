"""Embedders, rerankers and models that transcribe: weights, cache, and how many texts a second they read."""

from __future__ import annotations

import json

import pytest

from hpc_serve.cli.plan.plan_view import print_comparison
from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, Workload, catalog, model_from_config
from hpc_serve.plan.engine import max_num_batched_tokens
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.model.checkpoint import StoredTensor, loaded_bytes
from hpc_serve.units import GIB
from tests.support.configs import built, config_of
from tests.support.plans import made_plan

XLM_ROBERTA = dict(catalog.resolve("bge-m3").config)
NOMIC, COLBERT, GTE = map(config_of, ("nomic", "colbert", "gte"))


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (NOMIC, 136_731_648),
        (GTE, 305_368_320),
        ({**XLM_ROBERTA, "architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1}, 567_755_777),
        (XLM_ROBERTA, 567_754_752 - 1024 * 1025),  # vLLM leaves out the pooler
        (COLBERT, 109_482_240 - 768 * 769 + 768 * 128),  # BERT's, without the pooler, with the projection
        ("lfm2-1.2b", 1_170_340_608),  # as transformers makes it; its config names some sizes twice
        ({**COLBERT, "dim": 96}, 109_482_240 - 768 * 769 + 768 * 96),
    ],
)
def test_parameters_are_those_of_the_hub(config, published):
    assert built(config).parameters == published


def test_a_config_that_does_not_say_its_kind_of_positions_is_not_said_to_have_one():
    with pytest.raises(InvalidRequestError, match="The config has no 'position_embedding_type'"):
        built({**XLM_ROBERTA, "architectures": ["ColBERTJinaRobertaModel"], "position_embedding_type": None})


def test_robertas_first_positions_are_not_for_tokens():
    assert catalog.resolve("multilingual-e5-large").config["max_position_embeddings"] == 514
    _, model, _ = find_spec("multilingual-e5-large", environ={})
    assert model.max_model_len == 512


@pytest.mark.parametrize("name", ["bge-m3", "bge-reranker", "gte-modernbert", "all-minilm-l6-v2"])
def test_an_encoder_caches_nothing_and_needs_one_gpu(name):
    plan = made_plan(name, "l40s").chosen
    assert plan.layout.num_gpus == 1
    assert (plan.memory.kv_bytes_per_token, plan.memory.blocks_per_request) == (0, 0)
    assert plan.vllm_args[-2:] == ("--runner", "pooling")


def test_a_decoder_that_embeds_has_no_head_and_keeps_a_cache():
    embedder, decoder = find_spec("qwen3-embedding-8b", environ={})[1], find_spec("qwen3-8b", environ={})[1]
    plan = made_plan("qwen3-embedding-8b", "l40s").chosen
    assert plan.memory.blocks_per_request > 0
    head = 4096 * 151_936 * 2
    assert decoder.weight_bytes - plan.memory.weight_bytes >= head
    assert embedder.max_model_len == 40_960


def test_a_reranker_of_the_catalogue_is_told_what_it_is():
    words = made_plan("qwen3-reranker-8b", "l40s").chosen.vllm_args
    assert json.loads(words[words.index("--hf-overrides") + 1])["architectures"] == ["Qwen3ForSequenceClassification"]


@pytest.mark.parametrize(
    ("architecture", "base"),
    [("MistralModel", "MistralForCausalLM"), ("Qwen3ForSequenceClassification", "Qwen3ForCausalLM")],
)
def test_a_decoder_by_another_ending_is_that_decoder_without_a_head(architecture, base):
    config = dict(catalog.resolve("qwen3-8b" if base.startswith("Qwen3") else "e5-mistral").config)
    made = built({**config, "architectures": [architecture], "id2label": {"0": "x"}})
    whole = built({**config, "architectures": [base]})
    classifier = config["hidden_size"] if architecture.endswith("Classification") else 0
    assert whole.parameters - made.parameters == config["hidden_size"] * config["vocab_size"] - classifier
    assert made.engine_options == {"runner": "pooling"}
    assert whole.engine_options == {}


def test_a_folder_of_sentence_transformers_is_an_embedder(tmp_path):
    config = {**catalog.resolve("qwen3-8b").config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_spec(str(tmp_path))[1].engine_options == {}
    (tmp_path / "modules.json").write_text("[]")
    assert find_spec(str(tmp_path))[1].engine_options == {"runner": "pooling"}


def test_a_step_of_an_encoder_holds_a_whole_text():
    accelerator = cluster_named("l40s").accelerator
    assert max_num_batched_tokens(EngineConfig(), accelerator, 8192) == 2048
    assert max_num_batched_tokens(EngineConfig(takes_whole_texts=True), accelerator, 8192) == 8192
    assert max_num_batched_tokens(EngineConfig(takes_whole_texts=True), accelerator, 512) == 2048


def test_longer_texts_take_more_than_their_share():
    """Attention grows with the square of the length: 16 times as many tokens take more than 16 times as long."""
    short, long = (made_plan("bge-m3", "l40s", input_tokens=tokens).estimates()[-1].ideal for tokens in (512, 8192))
    assert short.requests_per_s > 16 * long.requests_per_s
    assert short.output_tokens_per_s == short.requests_per_s


AUDIO = "transcribes audio, .* leave out "


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("bge-m3", {"output_tokens": 5}, "leave out --output-tokens"),
        ("bge-m3", {"target": "tpot=50ms"}, "leave out --target"),
        ("bge-m3", {"decode_only": True}, "leave out --decode-only"),
        ("bge-m3", {"input_tokens": 9000}, "at most 8,192 are read"),
        ("bge-m3", {"engine": EngineConfig(runner="generate")}, "leave out --runner generate"),
        ("whisper-large-v3", {"target": "tpot=50ms"}, f"{AUDIO}--target"),
        ("whisper-large-v3", {"input_tokens": 100}, f"{AUDIO}--input-tokens"),
        ("whisper-large-v3", {"requests": 5, "arrivals": "burst"}, f"{AUDIO}--requests, --arrivals"),
        ("whisper-large-v3", {"ideal": True, "usd_per_gpu_hour": 2.0}, f"{AUDIO}--ideal, --usd-per-gpu-hour"),
        ("whisper-large-v3", {"engine": EngineConfig(runner="pooling")}, f"{AUDIO}--runner pooling"),
    ],
)
def test_what_a_model_that_does_not_write_text_cannot_do_is_refused(model, asked, words):
    with pytest.raises(InvalidRequestError, match=words):
        made_plan(model, "l40s", **asked)


def test_more_texts_at_once_than_one_wait_for_their_step():
    found = made_plan("bge-m3", "l40s", workload=Workload(concurrency=64)).estimates()
    rates = [one.speed.requests_per_s for one in found]
    assert rates == sorted(rates)


# -- models that transcribe audio

PAGE = 2 * 20 * 64 * 2 * 16
"""Bytes of a block of 16 tokens in a layer of whisper-large-v3: keys and values of 20 heads."""


def test_qwen3_asr_has_as_many_parameters_as_transformers_makes():
    entry = catalog.resolve("qwen3-asr-1.7b")
    of_hub = model_from_config(entry.config, name="x")
    of_transformers = {"architectures": entry.config["architectures"], **entry.config["thinker_config"]}
    assert of_hub.parameters == model_from_config(of_transformers, name="x").parameters == 2_038_052_480


def test_a_request_keeps_the_encoder_s_output_beside_its_tokens():
    model = find_spec("whisper-large-v3", environ={})[1]
    layout = cache_layout(model, EngineConfig(), 1)
    assert [group.kind for group in layout.groups] == ["full", "cross"]
    assert layout.bytes_per_block(0, 32) == 32 * PAGE
    assert layout.blocks_per_request(448, 2048) == 448 // 16 + -(-1500 // 16)
    assert full_context_bytes(model, EngineConfig(), 448) == (448 + 1500) * 32 * PAGE // 16


def test_vllm_counts_a_whole_step_of_the_encoder_s_output_when_it_starts():
    """What vLLM 0.32 printed on CPUs with 1 GiB of cache: 91,750 tokens, 204.80 requests of 448 tokens."""
    sizes = {f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 256}.items()}  # fmt: skip
    config = {**catalog.resolve("whisper-small").config, **sizes, "d_model": 128, "vocab_size": 321}
    model = model_from_config(config, name="tiny", dtype="float32")
    assert model.parameters == 1_032_832
    engine = EngineConfig(kv_cache_memory_bytes=2**30, max_num_seqs=8)
    memory = made_plan(model, "cpu-spr", total_bytes=4 * GIB, engine=engine).chosen.memory
    assert (memory.kv_cache_tokens, memory.max_concurrency) == (91_750, 204.8)


def test_more_requests_run_at_once_than_vllm_says():
    said = made_plan("whisper-large-v3", "l40s").chosen.memory.max_concurrency
    most = made_plan("whisper-large-v3", "l40s", workload=Workload(concurrency=int(1.2 * said))).chosen
    assert most.layout.num_gpus == 1
    assert not [reason for reason in most.reasons if "the others wait" in reason]


def test_the_files_layers_of_the_encoder_are_not_taken_for_those_of_a_decoder():
    """whisper-large-v3-turbo has 32 layers in its encoder and 4 in its decoder."""
    model = find_spec("whisper-large-v3-turbo", environ={})[1]

    def loaded(name: str) -> int:
        return loaded_bytes([StoredTensor(name=name, dtype="F16", elements=10, size_bytes=20)], model)

    assert loaded("model.encoder.layers.31.fc1.weight") == 20
    assert loaded("model.decoder.layers.3.fc1.weight") == 20
    assert loaded("proj_out.weight") == 0


def test_a_step_that_holds_no_audio_is_refused():
    plan = made_plan("whisper-large-v3", "l40s", engine=EngineConfig(max_num_batched_tokens=1024))
    assert "does not hold the 1,500 positions of an audio" in str(plan.error)


def test_its_speed_is_not_guessed(capsys):
    print_comparison([made_plan("whisper-small", gpu) for gpu in ("l40s", "h100-80gb")])
    assert "Speed: not planned" in capsys.readouterr().out
    assert made_plan("whisper-large-v3", "l40s").estimates() == []
    assert made_plan("qwen3-asr-1.7b", "l40s").estimates() != []
