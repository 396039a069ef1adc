"""Lines as vLLM printed them, several generations; sources as in benchmarks/accuracy/data/memory_cases.jsonl."""

from __future__ import annotations

import pytest

from hpc_serve.sizes import GIB
from hpc_serve.vllm.log import read_figures


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        (
            "(EngineCore pid=367) INFO 08-14 14:07:22 [gpu_worker.py:760] Available KV cache memory: 6.87 GiB",
            {"kv_cache_bytes": 6.87},
        ),
        (
            "(EngineCore pid=9) INFO 11-20 10:00:00 [kv_cache_utils.py:2327] GPU KV cache size: 90,112 tokens, "
            "Maximum concurrency for 2,048 tokens per request: 44.00x",
            {"kv_cache_tokens": 90112, "max_model_len": 2048, "max_concurrency": 44},
        ),
        (
            "(EngineCore pid=9) INFO 11-20 10:00:00 [kv_cache_utils.py:2327] CPU KV cache size: 16,384 tokens, "
            "Maximum concurrency for 1,024 tokens per request: 16.00x",
            {"kv_cache_tokens": 16384, "max_model_len": 1024, "max_concurrency": 16},
        ),
        ("INFO 06-23 14:21:48 [kv_cache_utils.py:637] GPU KV cache size: 410,128 tokens", {"kv_cache_tokens": 410128}),
        (
            "INFO 06-23 14:21:48 [x.py:1] Maximum concurrency for 131,072 tokens per request: 3.13x",
            {"max_model_len": 131072, "max_concurrency": 3.13},
        ),
        (
            "INFO 04-29 22:59:27 [gpu_model_runner.py:1347] Model loading took 7.1217 GiB and 170.700889 seconds",
            {"model_loading_bytes": 7.1217},
        ),
        (
            "INFO 11-20 10:00:00 [model_runner.py:424] Model loading took 14.99 GiB memory and 3.141593 seconds",
            {"model_loading_bytes": 14.99},
        ),
        (
            "INFO 11-18 11:22:41 model_runner.py:1060] Loading model weights took 56.7677 GB",
            {"model_loading_bytes": 56.7677},
        ),
        ("INFO 09-15 12:35:28 llm_engine.py:201] # GPU blocks: 7384, # CPU blocks: 6553", {"num_blocks": 7384}),
        ("INFO 03-14 18:57:59 [executor_base.py:111] # cuda blocks: 4739, # CPU blocks: 859", {"num_blocks": 4739}),
        (
            "model weights take 3.97GiB; non_torch_memory takes 2.10GiB; PyTorch activation peak memory takes 0.36GiB; "
            "the rest of the memory reserved for KV Cache is 29.02GiB.",
            {"model_loading_bytes": 3.97, "non_torch_bytes": 2.10, "activation_bytes": 0.36, "kv_cache_bytes": 29.02},
        ),
        (
            "Free memory on device (78.6/79.18 GiB) on startup. Desired GPU memory utilization is (0.9, 71.26 GiB). "
            "Actual usage is 8.96 GiB for weight, 1.23 GiB for peak activation, 0.02 GiB for non-torch memory, "
            "and 1.12 GiB for CUDAGraph memory.",
            {"model_loading_bytes": 8.96, "activation_bytes": 1.23, "non_torch_bytes": 0.02, "cuda_graph_bytes": 1.12},
        ),
        (
            "Actual usage is 56.89 GiB for consumed memory (weights + non-torch), 0.76 GiB for peak activation, "
            "and 0.32 GiB for CUDAGraph memory.",
            {"consumed_bytes": 56.89, "activation_bytes": 0.76, "cuda_graph_bytes": 0.32},
        ),
        (
            "INFO [gpu_model_runner.py:6582] Graph capturing finished in 22 secs, took -0.45 GiB",
            {"cuda_graph_bytes": -0.45},
        ),
        (
            "INFO [cpu_worker.py:201] Explicitly set (0.06/23.49) GiB for KV cache on node 0.",
            {"kv_cache_bytes": 0.06, "total_bytes": 23.49},
        ),
        (
            "INFO init engine (profile, create kv cache, warmup model) took 21.30 s (compilation: 9.00 s)",
            {"init_engine_s": 21.30},
        ),
        ("INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)", {}),
        ("Available KV cache memory: not yet known", {}),
    ],
)
def test_figures_of_a_line(line: str, figures: dict[str, float]) -> None:
    """Sizes are given in GiB here."""
    wanted = {name: round(value * GIB) if name.endswith("_bytes") else value for name, value in figures.items()}
    assert read_figures(line) == wanted
