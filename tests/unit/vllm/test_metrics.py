"""The engine's figures, from text as vLLM prints it."""

from __future__ import annotations

import pytest

from hpc_serve.vllm.metrics import requests_under_way

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
    assert requests_under_way(TEXT) == 7


@pytest.mark.parametrize(
    "text",
    ["", "vllm:num_requests_running 1.0\n", TEXT.replace(" 2.0", " NaN"), TEXT.replace(" 4.0", " many")],
)
def test_what_the_engine_does_not_say_is_not_known(text):
    assert requests_under_way(text) is None
