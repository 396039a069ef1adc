"""Figures that vLLM prints when it starts, read from its log lines, under the names the planner uses.

One line at a time and cheap: lines that cannot hold a figure are dismissed by a substring before any pattern is tried.
Sizes become bytes (vLLM prints GiB with two digits, so they are good to 10 MiB), times seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hpc_serve.sizes import GIB

_NUMBER = r"(-?[\d.,]+)"


def _gib(text: str) -> float:
    return round(float(text.replace(",", "")) * GIB)


def _number(text: str) -> float:
    value = float(text.strip(",.").replace(",", ""))
    return int(value) if value.is_integer() else value


_Reader = tuple[str, re.Pattern[str], tuple[tuple[str, Callable[[str], float]], ...]]


def _reader(hint: str, pattern: str, *fields: tuple[str, Callable[[str], float]]) -> _Reader:
    return hint, re.compile(pattern.replace("#", _NUMBER).replace("№", "#")), fields


_READERS: tuple[_Reader, ...] = (
    _reader("Model loading took", r"Model loading took # GiB", ("model_loading_bytes", _gib)),
    _reader("Loading model weights took", r"Loading model weights took # GB", ("model_loading_bytes", _gib)),
    _reader("Loading weights took", r"Loading weights took # seconds", ("loading_weights_s", _number)),
    _reader("KV cache memory", r"Available KV cache memory: # GiB", ("kv_cache_bytes", _gib)),
    _reader("GiB for KV cache", r"\(#/#\) GiB for KV cache", ("kv_cache_bytes", _gib), ("total_bytes", _gib)),
    _reader("KV cache size", r"KV cache size: # tokens", ("kv_cache_tokens", _number)),
    _reader(
        "Maximum concurrency",
        r"Maximum concurrency for # tokens per request: #x",
        ("max_model_len", _number),
        ("max_concurrency", _number),
    ),
    _reader("# ", r"№ (?:GPU|cuda|CUDA) blocks: #", ("num_blocks", _number)),
    _reader(
        "model weights take",
        r"model weights take #GiB; non_torch_memory takes #GiB; PyTorch activation peak memory takes #GiB; "
        r"the rest of the memory reserved for KV Cache is #GiB",
        ("model_loading_bytes", _gib),
        ("non_torch_bytes", _gib),
        ("activation_bytes", _gib),
        ("kv_cache_bytes", _gib),
    ),
    _reader(
        "Actual usage is",
        r"Actual usage is # GiB for weight, # GiB for peak activation, # GiB for non-torch memory, "
        r"and # GiB for CUDAGraph",
        ("model_loading_bytes", _gib),
        ("activation_bytes", _gib),
        ("non_torch_bytes", _gib),
        ("cuda_graph_bytes", _gib),
    ),
    _reader(
        "for consumed memory",
        r"Actual usage is # GiB for consumed memory \(weights \+ non-torch\), # GiB for peak activation, "
        r"and # GiB for CUDAGraph",
        ("consumed_bytes", _gib),
        ("activation_bytes", _gib),
        ("cuda_graph_bytes", _gib),
    ),
    _reader("Graph capturing finished", r"Graph capturing finished in .* took # GiB", ("cuda_graph_bytes", _gib)),
    _reader("Estimated CUDA graph memory", r"Estimated CUDA graph memory: # GiB", ("cuda_graph_estimate_bytes", _gib)),
    _reader("init engine (", r"init engine \(.*\) took # s", ("init_engine_s", _number)),
)


def parse_measured(line: str) -> dict[str, float]:
    """The figures in one log line, by name; empty for a line without any.

    Names: model_loading_bytes, kv_cache_bytes, kv_cache_tokens, max_concurrency, max_model_len, num_blocks,
    activation_bytes, non_torch_bytes, consumed_bytes, cuda_graph_bytes, cuda_graph_estimate_bytes, total_bytes,
    loading_weights_s, init_engine_s.

    >>> parse_measured("GPU KV cache size: 410,128 tokens, Maximum concurrency for 131,072 tokens per request: 3.13x")
    {'kv_cache_tokens': 410128, 'max_model_len': 131072, 'max_concurrency': 3.13}
    """
    found: dict[str, float] = {}
    for hint, pattern, fields in _READERS:
        if hint in line and (match := pattern.search(line)):
            for (name, convert), text in zip(fields, match.groups()):
                found[name] = convert(text)
    return found
