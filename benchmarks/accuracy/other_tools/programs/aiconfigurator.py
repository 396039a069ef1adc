"""Asks aiconfigurator: `estimate_kv_cache` for memory and `cli_estimate` (mode "agg") for speed, of its vLLM database.

The config lies in a folder that it is given as the model's path. Memory of machines that it does not know is asked of
its naive estimate, which it offers for that.
"""

import importlib
import importlib.metadata
import json
import logging
import sys
import tempfile
from pathlib import Path

GIB = 1024**3
SYSTEMS = {
    "h100-80gb": "h100_sxm",
    "h100-64gb": "h100_sxm",
    "h200-141gb": "h200_sxm",
    "b200-180gb": "b200_sxm",
    "b300-270gb": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "a100-80gb": "a100_sxm",
    "a100-40gb": "a100_sxm",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
"""Machines that it has measurements of vLLM for."""
MODES = {"fp8": "fp8", "awq": "int4_wo", "gptq": "int4_wo", "fbgemm_fp8": "fp8"}


def main():
    logging.disable(logging.CRITICAL)
    memory = importlib.import_module("aiconfigurator_core.sdk.memory")
    api = importlib.import_module("aiconfigurator.cli.api")
    asked, answers = json.load(sys.stdin), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, question in enumerate(asked):
            model = Path(folder, str(number))
            model.mkdir()
            (model / "config.json").write_text(json.dumps(question["config"]))
            ask = memory_of if "max_model_len" in question else speed_of
            try:
                answers[question["id"]] = ask(memory if ask is memory_of else api, question, str(model))
            except Exception as error:
                answers[question["id"]] = {
                    "refused": f"{type(error).__name__}: {error}".replace(str(model), "MODEL")[:300]
                }
    print(json.dumps({"version": importlib.metadata.version("aiconfigurator"), "answers": answers}))


def experts(question):
    config = question["config"]
    if not any("expert" in key for key in {**config, **config.get("text_config", {})}):
        return {"moe_tp_size": 1, "moe_ep_size": 1}
    parallel = question["expert_parallel"]
    return {"moe_tp_size": 1 if parallel else question["tp"], "moe_ep_size": question["tp"] if parallel else 1}


def memory_of(memory, question, model):
    if question["loaded_otherwise"] == "float32":
        return {"not_asked": "it has no option for weights loaded as float32"}
    quantized = question["loaded_otherwise"]
    modes = {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"} if quantized else {}
    if question["kv_cache_dtype"] != "auto":
        modes["kvcache_quant_mode"] = "fp8"
    system = SYSTEMS.get(question["accelerator"])
    found = memory.estimate_kv_cache(
        model,
        system or "unknown",
        "vllm",
        memory.perf_database.get_latest_database_version(system, "vllm") if system else None,
        max_num_tokens=question["max_num_batched_tokens"],
        max_batch_size=question["max_num_seqs"],
        memory_fraction_kind="of_total",
        memory_fraction_value=question["utilization"],
        tp_size=question["tp"],
        pp_size=question["pp"],
        gpu_memory_capacity_bytes_override=int(question["gpu_gib"] * GIB),
        allow_naive_fallback=True,
        **experts(question),
        **modes,
    )
    size, tokens = found["total_kv_size_bytes"], found["total_kv_size_tokens"]
    figures = {"cache": size / GIB, "fits": tokens >= question["max_model_len"], "source": found["source"]}
    if tokens:
        figures["token"] = size / tokens
    breakdown = found["memory_breakdown"]
    if breakdown:
        figures["weights"] = breakdown["weights_bytes"] / GIB
    return figures


def speed_of(api, question, model):
    system = SYSTEMS.get(question["accelerator"])
    if system is None:
        return {"not_asked": f"it has no measurements of vLLM on {question['accelerator']}"}
    options = {}
    if question["kv_cache_dtype"] != "auto":
        options["kvcache_quant_mode"] = "fp8"
    mode = None if "quantization_config" in question["config"] else MODES.get(question["quantization"])
    if mode:
        options |= {"gemm_quant_mode": mode, "moe_quant_mode": mode}
    if any("expert" in key for key in question["config"]):
        options |= experts(question)
    found = api.cli_estimate(
        model,
        system,
        mode="agg",
        backend_name="vllm",
        isl=question["input_tokens"],
        osl=question["output_tokens"],
        batch_size=question["in_flight"],
        ctx_tokens=question["max_num_batched_tokens"],
        tp_size=question["tp"],
        pp_size=question["pp"],
        **options,
    )
    figures = {"speed": found.raw["tokens/s"] * question["replicas"], "ttft_s": found.ttft / 1000}
    if found.kv_cache_warning:
        figures["note"] = "more requests than its cache holds"
    return figures


if __name__ == "__main__":
    main()
