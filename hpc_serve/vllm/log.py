"""Reads lines of an engine's log: the stage of the start, and the figures that vLLM prints.

It reads one line at a time. The words are vLLM's (0.6 to 0.32 use them); an unknown line has no meaning.
`start_progress` decides whether a start makes progress, and `diagnose` why one failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_serve.sizes import GIB
from hpc_serve.vllm.report_line import read_report

# The bars that vLLM's loaders show: safetensors, pt, np_cache, several threads, Run:ai, InstantTensor, fastsafetensors.
_SHARDS = re.compile(
    r"(?:checkpoint shards|Multi-thread loading [\w ]*shards|Loading \w+ checkpoint|Loading safetensors using [\w -]+)"
    r"\D*\d+% Completed \| (\d+)/(\d+)"
)
_FILES = re.compile(r"Fetching \d+ files:\s+\d+%\D*(\d+)/(\d+)")
_GRAPHS = re.compile(r"Capturing (?:[\w-]+ )*CUDA graphs?.*?(\d+)/(\d+)")
WEIGHTS_LOADED = "weights loaded"
SERVER_IS_UP = "server is up"
_STAGES = (
    (re.compile(r"Model loading took|Loading (?:model )?weights took"), WEIGHTS_LOADED),
    (re.compile(r"Starting to load model|Loading (?:model )?weights|Loading \w+ checkpoint"), "loading weights"),
    (re.compile(r"Downloading|Time spent downloading|\.(?:safetensors|bin|pt):\s+\d+%\|"), "downloading weights"),
    (
        re.compile(
            r"Using cache directory.*compile|Start compiling|Starting torch\.compile|torch\.compile (?:takes|took)"
            r"|Dynamo bytecode|[Cc]ompiling a graph for|Directly load the compiled graph|Cache the graph (?:for|of)"
            r"|Warming up model for the compilation"
        ),
        "compiling",
    ),
    (re.compile(r"Initial profiling/warmup run|Memory profiling takes|Profiling CUDA graph memory"), "profiling"),
    (re.compile(r"KV cache size|# (?:GPU|cuda|CUDA|CPU) blocks|Available KV cache memory"), "sizing the KV cache"),
    (re.compile(r"Capturing (?:[\w-]+ )*(?:CUDA graph|cudagraph)|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"Warming up"), "warming up"),
    (re.compile(r"Waiting for creating a placement group"), "waiting for Ray to place the workers"),
    (re.compile(r"Application startup complete|Starting vLLM (?:API )?server"), SERVER_IS_UP),
)
_HEALTH_ANSWER = re.compile(r'"(GET|HEAD) /health HTTP/[\d.]+" 200\b')

# Lines with figures: a part by which a line is found before any pattern is tried, and the pattern. A name in angle
# brackets stands for a number; sizes are GiB.
_FIGURES = {
    hint: re.compile(re.sub(r"<(\w+)>", r"(?P<\1>-?[\\d.,]+)", pattern))
    for hint, pattern in {
        "Checkpoint size": r"Checkpoint size: <checkpoint_bytes> GiB",
        "Model loading took": r"Model loading took <model_loading_bytes> GiB",
        "Loading model weights took": r"Loading model weights took <model_loading_bytes> GB",
        "Loading weights took": r"Loading weights took <loading_weights_s> seconds",
        "KV cache memory": r"Available KV cache memory: <kv_cache_bytes> GiB",
        "GiB for KV cache": r"\(<kv_cache_bytes>/<total_bytes>\) GiB for KV cache",
        "KV cache size": r"KV cache size: <kv_cache_tokens> tokens",
        "Maximum concurrency": r"Maximum concurrency for <max_model_len> tokens per request: <max_concurrency>x",
        "# ": r"# (?:GPU|cuda|CUDA) blocks: <num_blocks>",
        "model weights take": r"model weights take <model_loading_bytes>GiB; non_torch_memory takes "
        r"<non_torch_bytes>GiB; PyTorch activation peak memory takes <activation_bytes>GiB; the rest of the memory "
        r"reserved for KV Cache is <kv_cache_bytes>GiB",
        "Actual usage is": r"Actual usage is <model_loading_bytes> GiB for weight, <activation_bytes> GiB for peak "
        r"activation, <non_torch_bytes> GiB for non-torch memory, and <cuda_graph_bytes> GiB for CUDAGraph",
        "for consumed memory": r"Actual usage is <consumed_bytes> GiB for consumed memory \(weights \+ non-torch\), "
        r"<activation_bytes> GiB for peak activation, and <cuda_graph_bytes> GiB for CUDAGraph",
        "Graph capturing finished": r"Graph capturing finished in .* took <cuda_graph_bytes> GiB",
        "Estimated CUDA graph memory": r"Estimated CUDA graph memory: <cuda_graph_estimate_bytes> GiB",
        "init engine (": r"init engine \(.*\) took <init_engine_s> s",
    }.items()
}


@dataclass(frozen=True)
class StartStage:
    """A short phrase, and how much of it is done where the engine says so."""

    name: str
    done: int | None = None
    total: int | None = None


def read_stage(line: str) -> StartStage | None:
    """Return the stage that `line` announces, or None.

    >>> read_stage("Loading safetensors checkpoint shards:   1% Completed | 2/191 [00:09<15:58,  5.07s/it]")
    StartStage(name='loading weights', done=2, total=191)
    """
    if shards := _SHARDS.search(line):
        return StartStage("loading weights", int(shards[1]), int(shards[2]))
    if files := _FILES.search(line):
        return StartStage("downloading weights", int(files[1]), int(files[2]))
    if graphs := _GRAPHS.search(line):
        return StartStage("capturing CUDA graphs", int(graphs[1]), int(graphs[2]))
    return next((StartStage(name) for pattern, name in _STAGES if pattern.search(line)), None)


def read_figures(line: str) -> dict[str, float]:
    """Return the figures in `line`, by the names that the planner uses; empty for a line without any.

    Names: checkpoint_bytes, model_loading_bytes, kv_cache_bytes, kv_cache_tokens, max_concurrency, max_model_len,
    num_blocks, activation_bytes, non_torch_bytes, consumed_bytes, cuda_graph_bytes, cuda_graph_estimate_bytes,
    total_bytes, loading_weights_s, init_engine_s. vLLM prints GiB with two digits, so sizes are good to 10 MiB.

    >>> read_figures("GPU KV cache size: 410,128 tokens, Maximum concurrency for 131,072 tokens per request: 3.13x")
    {'kv_cache_tokens': 410128, 'max_model_len': 131072, 'max_concurrency': 3.13}
    """
    found: dict[str, float] = {}
    for hint, pattern in _FIGURES.items():
        if hint in line and (match := pattern.search(line)):
            for name, text in match.groupdict().items():
                value = float(text.strip(",.").replace(",", ""))
                value = round(value * GIB) if name.endswith("_bytes") else value
                found[name] = int(value) if value == int(value) else value
    return found


def is_idle_report(line: str) -> bool:
    """Return whether `line` is vLLM's report, every ten seconds, of an engine that does next to nothing."""
    report = read_report(line)
    return report is not None and report.does_next_to_nothing


def is_decoder_note(line: str) -> bool:
    """Return whether `line` says that another decoder of audio is tried: vLLM says so at each request with audio.

    >>> is_decoder_note("WARNING 11-26 16:52:11 [audio.py:478] torchcodec unavailable (ImportError()); falling back")
    True
    """
    return "torchcodec unavailable" in line


def is_health_answer(line: str) -> bool:
    """Return whether `line` says that somebody asked `/health` and was told that the engine is well.

    >>> is_health_answer('INFO:     10.0.0.1:4711 - "GET /health HTTP/1.1" 200 OK')
    True
    """
    return _HEALTH_ANSWER.search(line) is not None
