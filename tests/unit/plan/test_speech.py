"""Models that transcribe audio: their weights, and what of an encoder's output a request keeps in the cache."""

from __future__ import annotations

import pytest

from hpc_serve.cli.plan.plan_view import print_comparison
from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, Workload, catalog, model_from_config
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.plan.make import FoundParts, PlanRequest, make_plan
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.model.checkpoint import StoredTensor, loaded_bytes
from hpc_serve.units import GIB
from tests.support.plans import made_plan

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
    found = FoundParts(model=model, cluster=cluster_named("cpu-spr", total_bytes=4 * GIB))
    memory = make_plan(PlanRequest(model="tiny", gpu="cpu-spr", engine=engine), found).chosen.memory
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


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"target": "tpot=50ms"}, "--target"),
        ({"input_tokens": 100}, "--input-tokens"),
        ({"requests": 5, "arrivals": "burst"}, "--requests, --arrivals"),
        ({"ideal": True, "usd_per_gpu_hour": 2.0}, "--ideal, --usd-per-gpu-hour"),
        ({"engine": EngineConfig(runner="pooling")}, "--runner pooling"),
    ],
)
def test_options_that_are_not_for_transcriptions_are_refused(asked, named):
    with pytest.raises(InvalidRequestError, match=f"transcribes audio, .* leave out {named}"):
        made_plan("whisper-large-v3", "l40s", **asked)


def test_a_step_that_holds_no_audio_is_refused():
    plan = made_plan("whisper-large-v3", "l40s", engine=EngineConfig(max_num_batched_tokens=1024))
    assert "does not hold the 1,500 positions of an audio" in str(plan.error)


def test_its_speed_is_not_guessed(capsys):
    print_comparison([made_plan("whisper-small", gpu) for gpu in ("l40s", "h100-80gb")])
    assert "Speed: not planned" in capsys.readouterr().out
    assert made_plan("whisper-large-v3", "l40s").estimates() == []
    assert made_plan("qwen3-asr-1.7b", "l40s").estimates() != []
