"""The engine's figures, from text as vLLM prints it."""

from __future__ import annotations

import pytest

from hpc_serve.vllm.metrics import EngineWork, read_work

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama 3 {x}"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
"""


def test_running_and_waiting_of_all_parts_are_added():
    assert read_work(TEXT).requests == 7


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests_running 1.0\n", TEXT.replace(" 2.0", " NaN"), TEXT.replace(" 4.0", " many")]
)
def test_what_the_engine_does_not_say_is_not_known(text):
    assert read_work(text).requests is None


WORK = (
    TEXT
    + """\
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 20.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7.0
vllm:generation_tokens_total{engine="0"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 2.0
vllm:iteration_tokens_total_count{engine="0"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:request_success_total{engine="0",finished_reason="abort"} 9.0
"""
)


def test_work_is_what_the_engine_does_over_all_parts():
    text = WORK + 'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    work = EngineWork(running=3, waiting=4, prompt_tokens=120.0, generation_tokens=5.0, cache_use=0.75)
    assert read_work(text) == work


@pytest.mark.parametrize("value", ["NaN", "many", "+Inf", "1e999"])
def test_work_that_is_no_number_is_not_known(value):
    names = ("num_requests_running", "generation_tokens_total", "kv_cache_usage_perc")
    assert read_work("".join(f"vllm:{name} {value}\n" for name in names)) == EngineWork()
