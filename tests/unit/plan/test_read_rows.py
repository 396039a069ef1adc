"""Readers of published measurements, on short excerpts of each format, and what they leave out."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.accuracy.read_rows import rows_of, value_of
from benchmarks.accuracy.row_formats import Page, options

ABOUT = {"repository": "owner/name", "commit": "0123abcd", "date": "2026-03-20"}
BLOCK = """
    ============ Serving Benchmark Result ============
    Successful requests:                     1000
    Maximum request concurrency:             512
    Benchmark duration (s):                  {seconds}
    Total input tokens:                      342058
    Total generated tokens:                  281412
    Request throughput (req/s):              18.27
    Output token throughput (tok/s):         5202.94
    Mean TTFT (ms):                          1604.23
    Mean TPOT (ms):                          15.12
    ==================================================
"""
LAB = (
    "# Page\n## Conclusion\n```bash\nvllm serve Qwen/Qwen3.5-35B-A3B-FP8\n```\n## Experimental Setup\n"
    "### Model\n\n- Qwen/Qwen3.5-35B-A3B\n\n### Hardware\n\nNVIDIA H200\n\n"
    "### Engine Version\n\n- vLLM v0.17.1\n- SGLang v0.5.9\n\n"
    "### Benchmark Method\n\n##### ShareGPT\n\n```yaml\ndataset_name: ShareGPT\nrequest_rate: 1000\n```\n\n"
    "##### ShareGPT 8RPS\n\n```yaml\ndataset_name: ShareGPT\nrequest_rate: 8\n```\n\n## Experiment Results\n"
)


def lab_run(heading: str, params: str, profile: str = "ShareGPT", seconds: float = 54.74) -> str:
    return f"{heading}\n- Profile: `{profile}`\n```bash\n{params}\n```\n{BLOCK.format(seconds=seconds)}\n"


def read(format_name: str, page: Page, **given: Any) -> list[tuple[dict[str, Any], str | None]]:
    return list(rows_of(format_name, page, ABOUT, given))


def fields(row: dict[str, Any], *names: str) -> list[Any]:
    return [row[name] for name in names]


def test_a_page_of_gpustack() -> None:
    text = LAB + "".join(
        [
            lab_run("### Engine\n#### vLLM", "--max-model-len=32768"),
            lab_run("### Engine\n#### SGLang", "--context-length=32768", seconds=96.01),
            lab_run("### Quantization", "--max-model-len=32768"),
            lab_run("### Speculative Decoding", '--speculative-config={"method":"mtp"}'),
            lab_run("### Prefix Cache", "--max-model-len=32768 --enable-prefix-caching"),
            lab_run("### Rate", "--max-model-len=32768", profile="ShareGPT 8RPS", seconds=130.18),
            lab_run("### Ranks", "--tp-size=8\n--dp-size=8"),
        ]
    )
    first, other, quantized, *left = read("gpustack", Page(path="docs/performance-lab/x/h200.md", text=text))
    row, reason = first
    assert reason is None
    assert row["source"] == "owner/name docs/performance-lab/x/h200.md@0123abcd"
    assert fields(row, "id", "engine", "engine_version") == ["name-x-h200-01", "vLLM", "0.17.1"]
    assert fields(row, "date", "accelerator", "tp", "isl", "osl") == ["2026-03-20", "h200-141gb", 1, 342.1, 281.4]
    assert row["out_tok_s"] == 5140.88  # tokens over seconds
    assert (row["concurrency"], row["max_num_seqs"]) == (1000, 512)  # all at once, 512 of them let in
    assert "ttft_ms_mean" not in row
    assert (other[0]["engine"], other[0]["engine_version"], other[0]["out_tok_s"]) == ("SGLang", "0.5.9", 2931.07)
    assert (quantized[0]["model"], quantized[0]["quantization"]) == ("Qwen/Qwen3.5-35B-A3B", "fp8")
    assert [reason for _, reason in left] == [
        "speculative decoding",
        "the same case as a row before it",
        "requests arrive over much of the run",
        "data or expert parallelism",
    ]


def test_what_vllm_bench_serve_prints_on_a_page() -> None:
    command = "vllm serve Qwen/Qwen3-32B \\\n  --tensor-parallel-size 2 \\\n  --max-num-seqs 64"
    text = f"```bash\n{command}\n```\n{BLOCK.format(seconds=50)}"
    page = Page(path="Qwen/Qwen3.md", text=text)
    row, reason = read("serve-text", page)[0]
    given, none = read("serve-text", page, engine_version="0.19.0", gpu="H200")[0]
    assert reason == "no version of the engine; the catalogue does not have the accelerator, which is not said"
    assert (row["tp"], row["max_num_seqs"], row["concurrency"]) == (2, 64, 512)
    assert none is None
    assert given["command"] == "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-num-seqs 64"
    assert "said by hand: engine_version, gpu" in given["confidence"]
    placeholder = "==== Serving Benchmark Result ====\nSuccessful requests:   xxx\n======================\n"
    assert "no tokens/s; no lengths" in str(read("serve-text", Page(path="a.md", text=placeholder))[0][1])


def test_a_saved_run_has_the_layout_of_its_servers_script() -> None:
    saved = {"date": "20260216-120009", "model_id": "Qwen/Qwen3.5-397B-A17B", "num_prompts": 160, "completed": 160}
    saved |= {"max_concurrency": 16, "duration": 200.0, "total_input_tokens": 163840, "total_output_tokens": 20480}
    scripts = {
        "x/serve_tp8.sh": "exec vllm serve $MODEL \\\n  --tensor-parallel-size 8 \\\n  --port $PORT",
        "x/serve_tep8.sh": "exec vllm serve $MODEL \\\n  --tensor-parallel-size 8 \\\n  --enable-expert-parallel",
    }

    def found(name: str) -> tuple[dict[str, Any], str | None]:
        files: dict[str, Any] = {"show": scripts.__getitem__, "names": lambda _: list(scripts)}
        page = Page(path=f"x/results/{name}", text=json.dumps(saved), **files)
        return read("serve-json", page, gpu="H200", engine_version="0.16.0")[0]

    row, reason = found("q_vllm_tp8_isl1024_osl128_conc16.json")
    assert reason is None
    assert (row["tp"], row["isl"], row["osl"], row["out_tok_s"], row["date"]) == (8, 1024.0, 128.0, 102.4, "2026-02-16")
    assert row["source"] == "owner/name x/results@0123abcd"
    assert found("q_vllm_tep8_isl1024_osl128_conc16.json")[1] == "data or expert parallelism"


def test_aggregated_results_are_of_one_gpu() -> None:
    one = {"hw": "mi300x", "conc": 128, "image": "vllm/vllm-openai:v0.19.0", "model": "moonshotai/Kimi-K2.5"}
    one |= {"tp": 8, "ep": 1, "framework": "vllm", "precision": "fp8", "isl": 1024, "osl": 1024}
    one |= {"output_tput_per_gpu": 130.2, "mean_ttft": 2.84}
    rows = [one, one | {"ep": 8}, one | {"image": "vllm/vllm-openai:nightly"}, one | {"disagg": True}]
    (row, none), *left = read("inferencex", Page(path="agg.json", text=json.dumps(rows)))
    assert none is None
    assert fields(row, "out_tok_s", "ttft_ms_mean", "engine_version", "n_gpus") == [1041.6, 2840.0, "0.19.0", 8]
    reasons = ["data or expert parallelism", "no version of the engine", "prefill and decode apart"]
    assert [reason for _, reason in left] == reasons


def test_a_summary_of_mlperf_needs_its_layout_said() -> None:
    text = "Samples per second: 89.6972\nTokens per second: 27072.5\nResult is : VALID\n"
    system = {"accelerator_model_name": "AMD Instinct MI300X", "accelerators_per_node": 8, "number_of_nodes": 1}
    files = {
        "closed/S/systems/8xMI300X.json": json.dumps({**system, "framework": "vLLM 0.9.0"}),
        "closed/S/results/8xMI300X/llama2-70b-99/Offline/measurements.json": '{"weight_data_types": "fp8"}',
    }
    path = "closed/S/results/8xMI300X/llama2-70b-99/Offline/performance/run_1/mlperf_log_summary.txt"
    page = Page(path=path, text=text, show=files.__getitem__)
    assert read("mlperf", page)[0][1] == "no layout"
    row, none = read("mlperf", page, tp=1, replicas=8)[0]
    assert none is None
    assert (row["n_gpus"], row["quantization"], row["isl"], row["osl"]) == (8, "fp8", 294, 301.8)
    assert row["source"] == "owner/name closed/S/results/8xMI300X/llama2-70b-99/Offline@0123abcd"


def test_an_offline_suite_of_accelmark() -> None:
    run = {"throughput_tokens_per_sec": 3908.22, "throughput_tokens_per_sec_total": 6779.65}
    run["elapsed_seconds_median"] = 8.9
    software = {"framework": "vLLM", "framework_version": "0.20.1+transformers"}
    found = {"suite_id": "suite_A", "software": software, "task": {"parallelism": {"tensor_parallel_size": 1}}}
    found |= {"environment": {"collected_at": "2026-05-18T04"}}
    found |= {"model": {"model_id": "meta-llama/Meta-Llama-3-8B-Instruct"}}
    suite = '{"request_count": 100, "max_model_len": 4096, "output_tokens_max": 512}'

    def one(chip: str, **run_: float) -> tuple[dict[str, Any], str | None]:
        metrics = {"offline": {"results_by_concurrency": [run_]}}
        text = json.dumps(found | {"chip": {"name": chip, "memory_gb": 140.4}, "metrics": metrics})
        return read("accelmark", Page(path="results/verified/a/result.json", text=text, show=lambda _: suite))[0]

    row, none = one("NVIDIA H20-3e", **run)
    assert none is None
    assert (row["isl"], row["osl"], row["concurrency"], row["memory_gb"]) == (255.6, 347.8, 100, 150.8)
    assert (row["engine_version"], row["date"]) == ("0.20.1", "2026-05-18")
    assert one("Apple M1", **run)[1] == "the catalogue does not have Apple M1"
    del run["throughput_tokens_per_sec_total"]
    assert one("NVIDIA H20-3e", **run)[1] == "no lengths of prompts and answers"


def test_a_table_of_the_tpu_recipes() -> None:
    manifest = "args:\n - --model=Qwen/Qwen3-32B\n - --tensor-parallel-size=8\n - --max-num-seqs=64\n"
    text = "  --max-concurrency=128\n\n1k/8k    | 5171.98 tok/s (1293.00 tok/s/chip)\n"

    def one(more: str) -> tuple[dict[str, Any], str | None]:
        files: dict[str, Any] = {"show": lambda _: manifest + more, "names": lambda _: ["a.yaml"]}
        page = Page(path="inference/ironwood/vLLM/Q/README.md", text=text, **files)
        return read("tpu-recipes", page, engine_version="0.13.0")[0]

    row, none = one("")
    assert none is None
    assert (row["tp"], row["accelerator"], row["isl"], row["osl"], row["concurrency"]) == (4, "v7x", 1024, 8192, 128)
    assert one(" - --enable-expert-parallel\n")[1] == "data or expert parallelism"


def test_options_and_values() -> None:
    assert options("vllm serve a/b -tp 4 --gpu-memory-utilization 0.9")["tp"] == 4
    assert value_of("tp=8") == ("tp", 8)
    assert value_of("gpu=H200") == ("gpu", "H200")


def test_answers_that_are_too_short() -> None:
    text = f"vllm serve Qwen/Qwen3-32B\n{BLOCK.format(seconds=50)}".replace("281412", "4000")
    page = Page(path="a.md", text=text)
    assert "fewer tokens than are compared" in str(read("serve-text", page, engine_version="0.19.0", gpu="H200")[0][1])
