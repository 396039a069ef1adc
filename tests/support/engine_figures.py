"""Starts a real vLLM engine and prints, as one line of JSON, the bytes of parameters each rank has loaded; the engine's
own log, with the KV cache it made, is around it. It answers no request.

    python -m tests.support.engine_figures FOLDER TP PP KV_CACHE_MEMORY_BYTES MAX_MODEL_LEN

A folder without weights gets random ones, without a tokenizer none. The CPU backend replaces matrices by packed ones
after loading, so they are counted just before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.arguments import given_words

LOADED = "_bytes_loaded"


def count_before_packing() -> None:
    """Make the loader of this process note a model's bytes before the backend changes them."""
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading

    def counting(model: Any, *arguments: Any) -> None:
        tensors = {parameter.data_ptr(): parameter for parameter in model.parameters()}
        setattr(model, LOADED, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        original(model, *arguments)

    base_loader.process_weights_after_loading = counting


def bytes_loaded(model: Any) -> int:
    """What was noted of a rank's model."""
    return getattr(model, LOADED)


def main(folder: str, tp: int, pp: int, cache_bytes: int, max_model_len: int) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # apply_model takes a function
    from vllm import LLM

    from tests.support.engine_figures import bytes_loaded as by_name  # not __main__'s, which workers cannot import

    engine = LLM(
        model=folder,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        kv_cache_memory_bytes=cache_bytes,
        max_model_len=max_model_len,
        enforce_eager=True,
        load_format="auto" if any(Path(folder).glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=not (Path(folder) / "tokenizer.json").exists(),
    )
    print("FIGURES " + json.dumps({"weight_bytes": engine.apply_model(by_name)}), flush=True)


if __name__ == "__mp_main__":  # a spawned process of the engine, which imports the main module first
    count_before_packing()
if __name__ == "__main__":
    folder, *sizes = given_words(__doc__, 5)
    main(folder, *map(int, sizes))
