"""Readers of the formats in which others publish measurements of speed, one function for each.

A reader yields what its file says, in the fields of data/speed_cases_later.jsonl. It decides nothing: read_rows.py
completes the rows and says which are left out. The sources:

- gpustack: pages of gpustack/gpustack, docs/performance-lab (its format since 2026);
- serve-text: what `vllm bench serve` prints, in a page beside its commands (vllm-project/recipes, pull requests);
- serve-json: what it saves, beside the script of the server (SemiAnalysisAI/InferenceX, experimental);
- inferencex: aggregated results of InferenceX and of vllm-project/perf-eval;
- mlperf: the summary of LoadGen, with the description of the system (mlcommons/inference_results_v…);
- accelmark: FreedomIntelligence/AccelMark, the offline scenario of its suites;
- tpu-recipes: tables of AI-Hypercomputer/tpu-recipes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

WHOLE = {
    "tp": r"tensor[-_]parallel[-_]size|tp[-_]size|tp",
    "pp": r"pipeline[-_]parallel[-_]size|pp[-_]size|pp",
    "dp": r"data[-_]parallel[-_]size|dp[-_]size|dp",
    "ep": r"ep[-_]size",
    "max_model_len": r"max[-_]model[-_]len|context[-_]length",
    "max_num_seqs": r"max[-_]num[-_]seqs|max[-_]running[-_]requests",
    "max_num_batched_tokens": r"max[-_]num[-_]batched[-_]tokens",
    "random_input_len": r"random-input(?:-len)?",
    "random_output_len": r"random-output(?:-len)?",
    "max_concurrency": r"max-concurrency",
}
WORDS = {
    "model": r"model|model-path",
    "kv_cache_dtype": r"kv[-_]cache[-_]dtype",
    "quantization": r"quantization",
    "gpu_memory_utilization": r"gpu[-_]memory[-_]utilization|mem-fraction-static",
}
SWITCHES = {
    "expert_parallel": r"enable-expert-parallel",
    "dp_attention": r"enable[-_]dp[-_]attention",
    "async_scheduling": r"async-scheduling",
    "enforce_eager": r"enforce-eager",
    "speculative": r"speculative[-_.]",
    "performance_mode": r"performance-mode",
}
MLPERF_TASKS = {
    "llama2-70b-99": ("meta-llama/Llama-2-70b-chat-hf", 294),
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", 778),
    "llama3_1-70b-fp8_dyn": ("meta-llama/Llama-3.1-70B-Instruct", 294),
    "gpt-oss-120b": ("openai/gpt-oss-120b", None),
}
"""The model of a task, and the mean of its prompts in tokens (OpenOrca, CNN-DailyMail) where the rules say it."""
MLPERF_FORMATS = {"fp8": "fp8", "fp4": "quark-mxfp4", "mxfp4": None}
SGLANG = re.compile(r"--(?:tp-size|dp-size|context-length|mem-fraction-static|model-path)\b")
BLOCK = re.compile(r"=+ *Serving Benchmark Result *=+\n(.*?)\n *={20,}", re.S)
TOKENS = {"k": 1024}


@dataclass(frozen=True, kw_only=True)
class Page:
    """One file of a repository. `show` has the text of another file there, "" if absent; `names` those in a folder."""

    path: str
    text: str
    show: Callable[[str], str] = lambda _: ""
    names: Callable[[str], list[str]] = lambda _: []


def options(command: str) -> Row:
    """Return the fields that the options of a command say; of one that is repeated the last."""

    def last(flags: str, value: str) -> str | None:
        found = re.findall(rf"(?<!\S)[\"'-]*--?(?:{flags})[ =]+[\"']?({value})", command)
        return str(found[-1]) if found else None

    row: Row = {name: int(found) for name, flags in WHOLE.items() if (found := last(flags, r"\d+"))}
    row |= {name: found for name, flags in WORDS.items() if (found := last(flags, r"[^\s\"'\\]+"))}
    row |= {name: True for name, flag in SWITCHES.items() if re.search(flag, command)}
    if share := row.get("gpu_memory_utilization"):
        row["gpu_memory_utilization"] = float(share)
    served = re.search(r"vllm serve ([\w./-]+)", command)
    return row | ({"model": served[1]} if served else {})


def serving_result(block: str) -> Row:
    """Return the figures that `vllm bench serve`, SGLang's client or GPUStack printed.

    Tokens/s are tokens over seconds where both are printed, because guidellm's own rate leaves out part of a run.
    """
    figures = {
        label.strip(): float(value)
        for label, value in re.findall(r"^ *([A-Z][^:\n]*): +([\d.]+)\s*·?\s*$", block, re.M)
    }
    get, requests = figures.get, figures.get("Successful requests", 0.0)
    row: Row = {
        "num_prompts": int(requests),
        "elapsed_s": get("Benchmark duration (s)"),
        "failed": get("Failed requests"),
    }
    for name, label in (("isl", "Total input tokens"), ("osl", "Total generated tokens")):
        if requests and label in figures:
            row[name] = round(figures[label] / requests, 1)
    row["concurrency"] = get("Maximum request concurrency") or get("Peak concurrent requests") or requests
    row["request_rate"] = get("Request rate configured (RPS)")
    generated, seconds = get("Total generated tokens"), row["elapsed_s"]
    row["out_tok_s"] = (
        round(generated / seconds, 2) if generated and seconds else get("Output token throughput (tok/s)")
    )
    row |= {"req_s": get("Request throughput (req/s)"), "ttft_ms_mean": get("Mean TTFT (ms)")}
    row["tpot_ms_mean"] = get("Mean TPOT (ms)")
    return row | ({"speculative": True} if "Acceptance rate" in block else {})


def gpustack(page: Page) -> Iterator[Row]:
    """Read a page of GPUStack's lab: its commands lack the model, and its baseline is the engine without options."""
    section = re.split(r"^### (?=Model|Hardware|Engine Version|Benchmark Method)", page.text, flags=re.M)
    setup = {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1].split("\n##")[0].strip() for part in section[1:]}
    versions = dict(re.findall(r"- (\w+) v([\w.]+)", setup["Engine Version"]))
    rates = dict(re.findall(r"^##### (.+)\n+```yaml\n(?:.*\n)*?request_rate: (\d+)", page.text, re.M))
    best, model = options(page.text.split("## Experiment Results")[0]).get("model"), setup["Model"].removeprefix("- ")
    heads, start, params = {"###": "", "####": ""}, page.text.index("## Experiment Results"), ""
    for number, found in enumerate(BLOCK.finditer(page.text, start), 1):
        before, start = page.text[start : found.start()], found.end()
        for level, title in re.findall(r"^(####?) (.+)$", before, re.M):
            heads |= {level: title, **({"####": ""} if level == "###" else {})}
        params = "\n".join(re.findall(r"```bash\n(.*?)```", before, re.S))
        asked = re.search(r"Profile: `(.+)`", before)
        profile = asked[1] if asked else next((one for one in rates if heads["####"].startswith(one)), "")
        rate = rates.get(profile) or next(iter(re.findall(r"^Rate (\d+)", heads["####"])), None)
        tuned = "Quantization" in heads["###"] or "Optimized benchmark result" in before
        row = serving_result(found[1]) | options(params) | {"model": best if tuned and best else model}
        engine = "SGLang" if heads["####"] == "SGLang" or SGLANG.search(params) else "vLLM"
        count = re.search(r"x(\d+)$", setup["Hardware"])
        if rate and int(rate) >= row["num_prompts"] > row["concurrency"]:  # all at once, and the client holds some back
            seats = int(min(row["concurrency"], row.get("max_num_seqs", row["concurrency"])))
            row |= {"concurrency": row["num_prompts"], "max_num_seqs": seats, "ttft_ms_mean": None}
        yield row | {
            "number": number,
            "engine": engine,
            "engine_version": versions.get(engine),
            "gpu": setup["Hardware"],
            "node_gpus": int(count[1]) if count else 1,
            "scenario": f"guidellm, {profile or heads['####']}",
            "request_rate": float(rate) if rate else None,
            "lengths_vary": "ShareGPT" in profile,
            "command": re.sub(r"[\s\\]+", " ", params).strip() or None,
        }


def serve_text(page: Page) -> Iterator[Row]:
    """Read what a page prints of `vllm bench serve`; the server's command is the last before it without `bench`."""
    for number, found in enumerate(BLOCK.finditer(page.text), 1):
        commands = re.findall(r"(?:vllm serve|vllm bench serve)(?:.*\\ *\n)*.*", page.text[: found.start()])
        served = next((one for one in reversed(commands) if one.startswith("vllm serve")), "")
        asked = next((one for one in reversed(commands) if "bench" in one), "")
        row = options(served) | serving_result(found[1])
        yield row | {
            "number": number,
            "engine": "vLLM",
            "scenario": "vllm bench serve",
            "lengths_vary": "--ignore-eos" not in asked and "random" not in asked,
            "command": re.sub(r"[\s\\]+", " ", served).strip() or None,
        }


def serve_json(page: Page) -> Iterator[Row]:
    """Read a saved run. The script of its server is the one in the folder above that serves the layout of its name."""
    saved, folder = json.loads(page.text), page.path.rsplit("/", 2)[0]
    layout = re.search(r"_(tp|tep|dep)\d+_", page.path)
    scripts = [one for one in page.names(folder) if "/serve_" in one]
    script = next((one for one in scripts if layout and layout[0].strip("_") in one), scripts[0] if scripts else "")
    command = re.search(r"vllm serve(?:.*\\ *\n)*.*", page.show(script))
    row = options(command[0].replace("$MODEL", saved["model_id"])) if command else {}
    requests, seconds = saved["completed"], saved["duration"]
    yield row | {
        "of": f"{folder}/results",
        "engine": "vLLM",
        "model": saved["model_id"],
        "scenario": "vllm bench serve random ignore-eos",
        "expert_parallel": bool(row.get("expert_parallel") or (layout and layout[1] != "tp")),
        "isl": round(saved["total_input_tokens"] / requests, 1),
        "osl": round(saved["total_output_tokens"] / requests, 1),
        "concurrency": saved["max_concurrency"],
        "num_prompts": requests,
        "failed": saved["num_prompts"] - requests,
        "elapsed_s": round(seconds, 2),
        "out_tok_s": round(saved["total_output_tokens"] / seconds, 2),
        "date": re.sub(r"(\d{4})(\d\d)(\d\d)-.*", r"\1-\2-\3", saved["date"]),
        "command": re.sub(r"[\s\\]+", " ", command[0]).strip() if command else None,
    }


def inferencex(page: Page) -> Iterator[Row]:
    """Read aggregated results: one object or a list. Their rates are those of one GPU."""
    found = json.loads(page.text)
    for number, one in enumerate(found if isinstance(found, list) else [found], 1):
        version = re.search(r"v(\d+\.\d+\.\d+)", one.get("image", ""))
        gpus = one.get("num_gpus") or one["tp"]
        yield {
            "number": number,
            "engine": {"vllm": "vLLM", "sglang": "SGLang"}.get(one["framework"], one["framework"]),
            "engine_version": version[1] if version else None,
            "model": one["model"],
            "gpu": one.get("hw") or one["device"],
            "tp": one["tp"],
            "ep": one.get("ep", 1),
            "dp_attention": str(one.get("dp_attention")).lower() == "true",
            "disaggregated": str(one.get("disagg")).lower() == "true",
            "speculative": one.get("spec_decoding") not in (None, "none", "false", False),
            "quantization": {"fp8": "fp8"}.get(one["precision"]),
            "scenario": "InferenceX client, random",
            "isl": one["isl"],
            "osl": one["osl"],
            "concurrency": one["conc"],
            "out_tok_s": round(one["output_tput_per_gpu"] * gpus, 2),
            "ttft_ms_mean": round(1000 * one["mean_ttft"], 2) if one.get("mean_ttft") else None,
            "tpot_ms_mean": round(1000 * one["mean_tpot"], 2) if one.get("mean_tpot") else None,
            "date": one.get("date", "")[:10] or None,
        }


def mlperf(page: Page) -> Iterator[Row]:
    """Read LoadGen's summary of an offline run. It says no layout, and the system says the engine's version."""
    parts = page.path.split("/")  # division/submitter/results/system/task/scenario/performance/run_1/file
    system = json.loads(page.show(f"{parts[0]}/{parts[1]}/systems/{parts[3]}.json"))
    weights = json.loads(page.show("/".join(parts[:6]) + "/measurements.json") or "{}").get("weight_data_types")
    words = " ".join(str(system.get(key)) for key in ("framework", "sw_notes", "other_software_stack"))
    version = re.search(r"vllm[ -]v?(\d+\.\d+\.\d+)", words, re.I)
    model, prompt = MLPERF_TASKS.get(parts[4].removesuffix(".9"), (parts[4], None))
    rates = dict(re.findall(r"^(Samples per second|Tokens per second): ([\d.]+)", page.text, re.M))
    samples, tokens = float(rates["Samples per second"]), float(rates.get("Tokens per second", 0))
    yield {
        "of": "/".join(parts[:6]),
        "engine": "vLLM" if "vllm" in words.lower() else system["framework"],
        "engine_version": version[1] if version else None,
        "model": model,
        "gpu": system["accelerator_model_name"],
        "node_gpus": int(system["accelerators_per_node"]) * int(system["number_of_nodes"]),
        "quantization": MLPERF_FORMATS.get(str(weights), weights),
        "scenario": f"MLPerf {parts[0]} {parts[5].capitalize()}",
        "isl": prompt,
        "osl": round(tokens / samples, 1),
        "concurrency": 10000,
        "out_tok_s": tokens,
        "req_s": samples,
        "failed": None if "Result is : VALID" in page.text else 1,
    }


def accelmark(page: Page) -> Iterator[Row]:
    """Read the offline scenario: all requests of the suite at once, whatever its client's concurrency is named."""
    found = json.loads(page.text)
    suite = json.loads(page.show(f"suites/{found['suite_id']}/suite.json"))
    layout, extra = found["task"].get("parallelism") or {}, found["task"].get("extra_config") or {}
    for run in found["metrics"].get("offline", {}).get("results_by_concurrency", [])[-1:]:
        requests, seconds = suite["request_count"], run["elapsed_seconds_median"]
        output, total = run["throughput_tokens_per_sec"], run.get("throughput_tokens_per_sec_total")
        yield {
            "of": f"results/verified {found['chip']['name'].lower().replace(' ', '_').replace('-', '_')}",
            "engine": found["software"]["framework"],
            "engine_version": found["software"]["framework_version"].split("+")[0],
            "model": found["model"]["model_id"],
            "gpu": found["chip"]["name"],
            "memory_gb": round(found["chip"]["memory_gb"] * 2**30 / 1e9, 1),
            "tp": layout.get("tensor_parallel_size"),
            "pp": layout.get("pipeline_parallel_size", 1),
            "dp": layout.get("data_parallel_size", 1),
            "ep": layout.get("expert_parallel_size", 1),
            "quantization": found["model"].get("quantization_method"),
            "max_model_len": suite["max_model_len"],
            **{name: extra[name] for name in ("max_num_seqs", "gpu_memory_utilization") if extra.get(name)},
            "scenario": f"{found['suite_id'].replace('_', ' ')} offline, all at once",
            "isl": round((total - output) * seconds / requests, 1) if total else None,
            "osl": round(output * seconds / requests, 1),
            "concurrency": requests,
            "num_prompts": requests,
            "lengths_vary": True,
            "longest_osl": suite["output_tokens_max"],
            "out_tok_s": output,
            "elapsed_s": seconds,
            "date": str((found.get("environment") or {}).get("collected_at", ""))[:10] or None,
        }


def tpu_recipes(page: Page) -> Iterator[Row]:
    """Read the table of a recipe; its commands stand in the page and in the manifests beside it."""
    folder = page.path.rsplit("/", 1)[0]
    manifests = "\n".join(page.show(one) for one in page.names(folder) if one.endswith((".yaml", ".yml")))
    row = options(f"{page.text}\n{manifests}")
    cores = row.pop("tp", None)
    for number, found in enumerate(re.finditer(r"^ *(\d+)k/(\d+)k +\| +([\d.]+)", page.text, re.M), 1):
        yield row | {
            "number": number,
            "engine": "vLLM TPU",
            "gpu": "TPU7x" if "ironwood" in page.path else page.path.split("/")[1],
            "tp": cores // 2 if cores and "ironwood" in page.path else cores,  # two cores of one chip
            "scenario": "InferenceX client, random ignore-eos",
            "isl": int(found[1]) * TOKENS["k"],
            "osl": int(found[2]) * TOKENS["k"],
            "concurrency": row.get("max_concurrency"),
            "out_tok_s": float(found[3]),
        }


FORMATS: Mapping[str, Callable[[Page], Iterator[Row]]] = {
    "gpustack": gpustack,
    "serve-text": serve_text,
    "serve-json": serve_json,
    "inferencex": inferencex,
    "mlperf": mlperf,
    "accelmark": accelmark,
    "tpu-recipes": tpu_recipes,
}
