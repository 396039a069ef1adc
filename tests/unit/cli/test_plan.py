"""`hpc-serve plan`: what it prints, its stable keys, its exit codes, and contexts as long as fit."""

from __future__ import annotations

import json
import re

import pytest

from hpc_serve.demo_model import make_demo_model
from hpc_serve.hub.hub import find_model
from hpc_serve.job.weights import weights_place

KEYS = {
    *("fits", "tensor_parallel_size", "pipeline_parallel_size", "replicas", "num_nodes", "gpus_per_node"),
    *("minimum_gpus", "memory", "kv_bytes_per_token", "kv_cache_tokens", "max_concurrency", "parameters"),
    *("vllm_args", "reasons"),
}


MEMORY_KEYS = {
    *("total_bytes", "weight_bytes", "activation_bytes", "cuda_graph_bytes", "non_torch_bytes", "kv_cache_bytes"),
}


def printed_wide(ran, *words: str) -> str:
    """The same on a terminal on which no line is broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        return ran(["plan", *words]).out


def test_json_has_stable_keys_whether_it_fits_or_not(plan):
    fits = plan("--model", "405b")
    too_small = plan("--model", "405b", "--nodes", "1", code=3)
    refused = plan("--model", "405b", "-tp", "8", "-pp", "4", "--nodes", "1", code=3)
    for document in (fits, too_small, refused):
        assert set(document) >= KEYS
        assert set(document["minimum_gpus"]) == {"weights", "full_context", "usable"}
    assert set(fits["memory"]) >= MEMORY_KEYS
    assert (fits["fits"], too_small["fits"], refused["fits"]) == (True, False, False)
    assert fits["parameters"] == 405_853_388_800
    assert (fits["tensor_parallel_size"], fits["pipeline_parallel_size"], fits["num_nodes"]) == (8, 2, 2)
    assert fits["vllm_args"][:2] == ["--tensor-parallel-size", "8"]
    assert too_small["remedies"]
    assert too_small["memory"]["kv_cache_bytes"] < 0


def test_a_size_that_the_planner_does_not_know_is_named_and_may_be_left_out(plan, ran, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**find_model("8b").config, "moe_latent_size": 1024}))
    error = " ".join(ran(["plan", str(tmp_path)], 2).err.split())
    assert "has moe_latent_size (1024), which this planner does not know for LlamaForCausalLM" in error
    found = plan(str(tmp_path), "--allow-unknown-config-keys")
    assert found["fits"]
    assert "moe_latent_size (1024)" in found["reasons"][-1]
    shown = " ".join(ran(["plan", str(tmp_path), "--allow-unknown-config-keys"]).out.split())
    assert "Note: the config has moe_latent_size (1024), which this planner does not know." in shown


def test_layers_that_are_not_loaded_are_explained(ran):
    shown = " ".join(ran(["plan", "zai-org/GLM-4.6", "--explain"]).out.split())
    assert "not loaded 1 x 3,988,069,792 (layers for multi-token prediction, which vLLM loads to speculate)" in shown


def test_an_explained_plan_has_its_bar_and_its_arithmetic(ran):
    text = ran(["plan", "--model", "70b", "--explain"]).out
    (bar,) = (line.strip() for line in text.splitlines() if "██" in line)
    assert len(bar) == 60
    for word in ("REPLICAS", "IN FLIGHT", "gpu_memory_utilization", "NCCL", "blocks", " / 80 = "):
        assert word in text


def test_the_plan_says_first_what_is_chosen_and_why_each_thing_once(plan, ran):
    for model in ("405b", "70b", "8b", "Qwen/Qwen3-Next-80B-A3B-Instruct"):
        found = plan("--model", model)
        text = " ".join(printed_wide(ran, model).split())
        verdicts = [one["verdict"] for one in found["candidates"]]
        assert len(re.findall(r" x \d+ +(?:chosen|fits|too small|refused) ", text)) <= 3
        assert text.count(" chosen ") == 1
        assert (" fits " in text) == ("fits" in verdicts)
        assert text.count(f"{found['kv_cache_tokens']:,} tokens of cache") == 1
        assert text.count("tokens/s") <= 3
        for one in found["candidates"]:
            assert f" {one['verdict']} {one['reason']} " in " ".join(printed_wide(ran, model, "--explain").split())


def test_accelerators_compared(plan, ran):
    text = ran(["plan", "--model", "70b", "--compare", "h100-80gb,mi300x,t4", "--nodes", "1"]).out
    assert max(len(line) for line in text.splitlines() if "does not fit" not in line and "TP=" not in line) <= 80
    memory, _, speed = text.partition("Speed to expect")
    assert ("t4 " in memory, "no fit" in memory, "t4" in speed) == (True, True, False)
    documents = plan("--model", "70b", "--compare", "h100-80gb,t4", "--nodes", "1")
    assert [document["fits"] for document in documents] == [True, False]
    assert "Speed" not in ran(["plan", "--model", "405b", "--compare", "t4,l4", "--nodes", "1"], 3).out


def test_encoders_are_compared_without_a_cache(ran):
    text = ran(["plan", "bge-m3", "--compare", "h100-80gb,l4"]).out
    assert text.startswith("BAAI/bge-m3, texts of up to 8,192 tokens; GiB per GPU:")
    assert "USABLE WEIGHTS UNUSED\n" in text
    for word in ("CACHE", "AT ONCE", "the cache allow"):
        assert word not in text
    assert "as many in flight as --max-num-seqs allows" in " ".join(text.split())


def test_how_weights_are_loaded_is_explained_as_far_as_it_is_known(ran, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert "Loading the weights: known once the job sees them" in ran(["plan", "--model", "8b", "--explain"]).out
    folder = make_demo_model(tmp_path / "model")
    monkeypatch.setattr(weights_place, "filesystem_of", lambda _: "gpfs")
    text = ran(["plan", "--model", str(folder), "--explain"]).out
    assert "Loading the weights: prefetch on nodes with " in text
    assert "`hpc-serve status NAME` say what it was" in text
    text = ran(["plan", "--model", str(folder), "--explain", "--", "--load-format", "runai_streamer"]).out
    assert "Loading the weights: --load-format runai_streamer reads the files in its own way" in text


def test_every_option_reaches_the_planner(plan):
    base = plan("--model", "70b", "-tp", "8")
    changed = {
        ("--gpu-memory", "60GiB"): "kv_cache_tokens",
        ("--max-model-len", "8192"): "max_concurrency",
        ("--max-num-seqs", "16"): "memory",
        ("--max-num-batched-tokens", "512"): "memory",
        ("--gpu-memory-utilization", "0.7"): "kv_cache_tokens",
        ("--kv-cache-memory-bytes", "20GiB"): "kv_cache_tokens",
        ("--quantization", "fp8"): "memory",
        ("--kv-cache-dtype", "fp8"): "kv_bytes_per_token",
        ("--enforce-eager",): "memory",
        ("--pipeline-parallel-size", "2"): "num_nodes",
        ("--vllm-version", "0.11.0"): "memory",
    }
    for words, key in changed.items():
        assert plan("--model", "70b", "-tp", "8", *words)[key] != base[key], words


def test_a_plan_for_a_later_version_takes_its_options(ran):
    assert "Not counted: --monokernel" in printed_wide(ran, "70b", "--vllm-version", "0.33", "--", "--monokernel")
    refused = ran(["plan", "70b", "--vllm-version", "0.32", "--", "--monokernel"], code=2)
    assert "vLLM 0.32.0 has no option --monokernel, 0.33.0 has it" in refused.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--model", "405"), 2, "Did you mean 405b"),
        (("--model", "70b", "--max-model-len", "999999"), 2, "131072 positions"),
        (("--model", "70b", "--nodes", "0"), 2, "nodes is 0"),
        (("--model", "70b", "--gpu-memory", "much"), 2, "is no size"),
        (("--model", "70b", "--gpu-memory", "80"), 2, "'80' is 80 bytes: write the unit"),
        (("--model", "70b", "--gpu-memory", "1KiB"), 2, "'1KiB' is 1,024 bytes: the least is 1MiB."),
        (("--model", "70b", "--gpu", "v5e:4x4", "--nodes", "2"), 2, "4 nodes x 4 chips, but --nodes is 2"),
        (("--model", "70b", "--gpu", "v5e:2x4"), 3, "--gpu v5e:4x4 (TP=16 PP=1)"),
        (("--model", "8b", "--gpu", "cpu-spr", "--gpu-memory", "64GB", "--nodes", "2"), 3, "within one node"),
        (("--model", "70b", "--quantization", "magic"), 2, "'magic'"),
        (("8b", "--gpu", "4x2"), 2, "write the chip before it, as in v6e:4x2"),
        (("8b", "--plot", "plan.bmp"), 2, "does not end in .png, .svg, .pdf or .html"),
        *((("8b", "--max-model-len", word), 2, "max") for word in ("many", "128kb", "-2", "0", "1.5.k")),
        (("--model", ""), 2, "'--model': it is empty"),
        (("--model", "8b", "--gpu", ""), 2, "'--gpu': it is empty"),
        (("--model", "8b", "--target", " "), 2, "'--target': it is empty"),
        (("--model", "8b", "--plot", ""), 2, "'--plot': it is empty"),
        (("--model", "8b", "--compare", ""), 2, "--compare names no accelerator"),
        (("--model", "8b", "--usd-per-gpu-hour", "nan"), 2, "'nan' is not a finite number"),
        (("--model", "8b", "--usd-per-gpu-hour", "inf"), 2, "'inf' is not a finite number"),
        (("--model", "8b", "--prefix-hits", "nan"), 2, "'nan' is not a finite number"),
        (("--model", "8b", "--acceptance-length", "1e400"), 2, "'1e400' is not a finite number"),
        (("8b", "--gpus-per-node", "0"), 2, "gpus-per-node is 0: it must be at least 1"),
        (("--model", "8b", "--compare", "h100,mi300x", "--plot", "plan.png"), 2, "--plot draws one accelerator"),
    ],
)
def test_what_cannot_be_is_said(ran, words, code, says):
    assert says in ran(["plan", *words], code).err


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("--nodes 4 --gpus-per-node 4 -tp 4 -pp 1", "4 nodes x 4 GPUs are 16: 12 would stay idle"),
        ("--nodes 3 --gpus-per-node 4 -tp 2 -pp 3", "3 nodes x 4 GPUs are 12: 6 would stay idle"),
        ("--gpu v5e:4x4 -tp 4 -pp 1", "4 nodes x 4 chips are 16: 12 would stay idle"),
        ("--gpu v6e:2x4 -tp 4 -pp 1", "1 node x 8 chips are 8: 4 would stay idle"),
        ("--gpu cpu-spr-2s --gpu-memory 256GiB -tp 1 -pp 1", "1 node x 2 sockets are 2: 1 would stay idle"),
    ],
)
def test_gpus_that_were_asked_for_are_not_left_idle(plan, ran, words, idle):
    asked = words.split()
    error = ran(["plan", "8b", *asked], 3).err
    assert idle in error
    instead = error.split("; use ")[1].splitlines()[0].removesuffix(".").split(", or ")
    assert instead
    for advice in instead:  # each is accepted as it is written
        option, value = advice.split()[:2]
        place = asked.index(option.replace("--pipeline-parallel-size", "-pp"))
        found = plan("8b", *asked[: place + 1], value, *asked[place + 2 :])
        ranks = found["tensor_parallel_size"] * found["pipeline_parallel_size"]
        assert ranks == found["num_nodes"] * found["gpus_per_node"]


def test_idle_gpus_that_nobody_asked_for_are_told(plan):
    reasons = plan("8b", "--nodes", "4", "-tp", "4", "-pp", "1")["reasons"]
    assert any("7 of 8 GPUs of each stay idle" in reason for reason in reasons)


def test_a_target_keeps_the_sizes_asked_for(plan):
    found = plan("8b", "--nodes", "1", "-tp", "2", "-pp", "1", "--target", "throughput")
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"], found["replicas"]) == (2, 1, 4)


def compared(ran, *words: str) -> tuple[list[str], list[list[str]]]:
    """(the heading's words, rows of cells) of the speeds that --compare prints for a 70b."""
    text = ran(["plan", "--model", "70b", "--compare", *words]).out
    assert max(len(line) for line in text.splitlines()) <= 80
    table = text[text.index("Speed to expect") :].splitlines()
    first = next(place for place, line in enumerate(table) if line.startswith("GPU "))
    return " ".join(table[:first]).split(), [line.replace(",", "").split() for line in table[first:] if line[:1] != "─"]


def test_a_comparison_counts_every_replica(plan, ran):
    words = ("mi300x,h20", "--target", "throughput", "--input-tokens", "2000", "--output-tokens", "500")
    heading, (_, *rows) = compared(ran, *words)
    assert {"2,000", "500"} <= set(heading)
    answers = plan("--model", "70b", "--compare", *words)
    assert answers[0]["replicas"] > 1
    assert {row[0] for row in rows} == {"mi300x", "h20-96gb"}
    for (_, gpus, in_flight, _, _, per_second, per_gpu), answer in zip(rows, answers):
        assert int(gpus) == answer["replicas"] * answer["num_nodes"] * answer["gpus_per_node"] == 8
        assert int(in_flight) % answer["replicas"] == 0
        assert int(per_second) == pytest.approx(int(per_gpu) * int(gpus), abs=int(gpus))
    text = ran(["plan", "--model", "70b", "--compare", *words]).out
    assert "REPLICAS" in text
    assert "REPLICAS" not in ran(["plan", "--model", "70b", "--compare", "mi300x,h100"]).out


def test_a_comparison_at_the_concurrency_asked_for_and_within_a_target(ran):
    _, (_, *rows) = compared(ran, "h100,mi300x", "--concurrency", "4")
    assert [row[2] for row in rows] == ["4", "4"]
    _, (_, *rows) = compared(ran, "h100,mi300x", "--target", "tpot=40ms")
    for row in rows:
        assert float(row[3]) <= 40
        assert int(row[2]) > 1


def test_a_comparison_with_a_price(ran):
    heading, (titles, *rows) = compared(ran, "h100,mi300x", "--usd-per-gpu-hour", "2")
    assert "2 dollars an hour" in " ".join(heading)
    assert titles[-2:] == ["PER", "$"]
    for row in rows:
        assert float(row[-2]) == pytest.approx(int(row[-3]) * 3600 / 2 / 1e6, abs=0.01)


def test_a_picture_s_name_is_said(tmp_path, ran):
    page = tmp_path / "plan.html"
    assert ran(["plan", "8b", "--plot", str(page)]).err == f"wrote {page}\n"
    assert page.exists()


FOUR = ("70b", "--gpu", "a100-40gb", "--nodes", "1", "--gpus-per-node", "4")
TWO = ("70b", "--gpu", "a100-40gb", "--nodes", "1", "--gpus-per-node", "2")


@pytest.mark.parametrize(("word", "length"), [("128k", 128_000), ("8K", 8192), ("8192", 8192)])
def test_contexts_are_written_as_for_vllm(plan, word, length):
    assert plan("8b", "--max-model-len", word)["max_model_len"] == length


def test_auto_is_the_longest_context_that_the_machines_hold(plan):
    assert plan("8b", "--max-model-len", "auto")["max_model_len"] == 131072
    assert plan("8b")["contexts"] == []
    found = plan(*FOUR, "--max-model-len", "auto")
    length = found["max_model_len"]
    assert 1024 < length < 131072
    assert found["vllm_args"][found["vllm_args"].index("--max-model-len") + 1] == str(length)
    assert found["reasons"][0].startswith(f"--max-model-len {length}: ")
    assert plan(*FOUR, "--max-model-len", str(length))["fits"]
    assert not plan(*FOUR, "--max-model-len", str(length + 1024), code=3)["fits"]


def test_every_layout_with_its_contexts_is_in_one_table(plan, ran):
    found = plan(*FOUR, "--max-model-len", "auto")["contexts"]
    assert len(found) >= 2
    for layout in found:
        lengths = [entry["max_model_len"] for entry in layout["by_requests"]]
        assert lengths == sorted(lengths, reverse=True)
        sizes = ("-tp", str(layout["tensor_parallel_size"]), "-pp", str(layout["pipeline_parallel_size"]))
        for entry in layout["by_requests"][:2]:
            if entry["max_model_len"]:
                words = (*FOUR, *sizes, "--concurrency", str(entry["at_once"]))
                again = plan(*words, "--max-model-len", str(entry["max_model_len"]))
                assert again["remedies"] == []
    assert "Longest context by layout" in ran(["plan", *FOUR, "--max-model-len", "auto"]).out


def test_options_that_help_only_together_are_suggested_together(plan):
    (both,) = (text for text in plan(*TWO, code=3)["remedies"] if text.startswith("--quantization"))
    words = both.partition(" (")[0].split()
    assert words[::2] == ["--quantization", "--max-model-len"]
    assert plan(*TWO, *words)["max_model_len"] == int(words[3])
    for one in (words[:2], words[2:]):
        assert plan(*TWO, *one, code=3)["fits"] is False


def test_render_keeps_the_word_and_serves_the_number(ran):
    script = ran(["render", *FOUR, "--max-model-len", "auto"]).out
    assert "--max-model-len auto" in script
    assert "--max-model-len -1" not in script


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("words", [("405b", "--nodes", "2"), ("8b", "--usd-per-gpu-hour", "2"), FOUR])
def test_nothing_of_a_plan_is_cut_off(ran, columns, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ran(["plan", *words, "--max-model-len", "auto"]).out.splitlines()
    assert not any("…" in line for line in lines)
    assert all(len(line) <= columns for line in lines if not line.startswith("vllm serve"))


def test_one_table_has_all_layouts(plan, ran):
    """With auto a layout has its contexts where it otherwise has its reason; the chosen one and those beside it too."""
    text = ran(["plan", "405b", "--max-model-len", "auto"]).out
    lines = [line.split() for line in text.splitlines()]
    assert sum(line[:3] == ["TP", "PP", "NODES"] for line in lines) == 1
    assert ["8", "1", "1", "x", "8", "too", "small", "-", "-", "-", "-"] in lines
    (chosen,) = (line for line in lines if "chosen" in line)
    assert chosen[:7] == ["8", "2", "2", "x", "8", "chosen", "131,072"]
    (across,) = (line for line in lines if line[:5] == ["16", "1", "2", "x", "8"])
    assert across[5:7] == ["fits", "131,072"]
    found = plan("405b", "--max-model-len", "auto")
    assert {found["num_nodes"], *(layout["num_nodes"] for layout in found["contexts"])} == {2}
