"""`models` and `gpus`: the catalogue's, the site's own, and what a file of models cannot hold."""

from __future__ import annotations

import pytest

from hpc_serve.plan.catalog import accelerator_entries


def test_the_accelerators_are_listed_and_the_default_is_named(ran):
    out = ran(["gpus"]).out
    assert all(f"  {entry['name']} " in out for entry in accelerator_entries().values())
    assert "h100-80gb is assumed" in out
    assert "* " not in out


@pytest.mark.parametrize(("gpu", "name"), [("h200", "h200-141gb"), ("v5e:4x4", "v5e"), ("cpu-spr-2s", "cpu-spr")])
def test_the_site_s_own_accelerator_is_marked(gpu, name, site, ran):
    site(f"gpu: {gpu}\n")
    out = ran(["gpus"]).out
    assert f"* {name} " in out
    assert f"the site file's: {gpu}" in out
    assert out.count("* ") == 2


def test_accelerators_by_a_word_and_as_json(ran, told):
    found = told("gpus", "mi300")
    assert [entry["name"] for entry in found] == ["mi300a", "mi300x"]
    assert (found[1]["engine"], found[1]["per_node"]) == ("ROCm", 8)
    assert "`hpc-serve gpus` lists all" in ran(["gpus", "zx81"], 1).err


def test_models_lists_the_catalogue(ran, told):
    out = ran(["models"]).out
    assert "meta-llama/Llama-3.1-405B-Instruct" in out.replace("\n", "")
    assert max(map(len, out.splitlines())) <= 80
    (entry,) = [one for one in told("models", "405b") if "405b" in one["aliases"]]
    assert entry["published_parameters"] > 405e9
    for words in (["models", "no-such-model"], ["models", "no-such-model", "--fits"]):
        assert "No model has 'no-such-model' in its name" in ran(words, 1).err


@pytest.mark.parametrize(("columns", "is_wide"), [("40", False), ("60", True)])
def test_a_narrow_terminal_has_no_column_of_sizes_or_descriptions(columns, is_wide, ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    models, gpus = (ran(words).out.splitlines()[0].split() for words in (["models", "mi"], ["gpus", "mi3"]))
    assert ("PARAMETERS" in models, "IS" in gpus) == (is_wide, is_wide)


def test_no_column_is_so_narrow_that_its_words_stand_upright(ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = ran(["gpus"]).out
    assert out.splitlines()[0].split() == ["NAME", "MEMORY", "PER", "NODE", "ENGINE"]
    assert len(out.splitlines()) < len(accelerator_entries()) + 5


def test_models_that_fit_the_site_s_gpus(site, ran, told, plan):
    site("gpu: l4\ngpus_per_node: 1\n")
    found = {one["name"]: one["layout"] for one in told("models", "--fits", "llama")}
    assert "meta-llama/Llama-3.1-405B-Instruct" not in found
    for name, layout in found.items():
        sizes = plan(name, "--nodes", "1")
        assert layout == f"TP={sizes['tensor_parallel_size']} PP={sizes['pipeline_parallel_size']}"
    assert "No model fits one node of l4" in ran(["models", "--fits", "405b"], 1).err


def test_models_that_fit_the_gpus_a_plan_is_asked_for(site, ran, told):
    site("gpu: l4\ngpus_per_node: 1\n")
    names = ["--gpu", "h100", "--gpus-per-node", "8"]
    assert [one["layout"] for one in told("models", "llama-3.3-70b", *names)] == ["TP=4 PP=1"]
    assert "LAYOUT is of one node of h100" in ran(["models", "8b", "--fits", *names]).out
    assert "No model fits one node of h100." in ran(["models", "8b", "--gpu", "h100", "--gpu-memory", "2GiB"], 1).err


def test_models_that_fit_a_whole_slice_of_several_hosts(ran):
    out = ran(["models", "qwen3-8b", "--gpu", "v5e:4x4"]).out
    assert "TP=16 PP=1" in out
    assert "LAYOUT is of v5e:4x4," in out


def test_fits_says_what_is_missing_of_the_node_rather_than_that_no_model_fits(site, ran):
    site("gpu: cpu-spr-2s\n")
    assert "give the memory of a socket with --gpu-memory" in ran(["models", "--fits"], 2).err
    assert "Did you mean h100" in ran(["models", "--gpu", "h1oo"], 2).err
    assert "TP=2" in ran(["models", "qwen3-8b", "--fits", "--gpu-memory", "256GiB"]).out


OURS = """
- name: Group-8b
  model: 8b
  vllm_args: [--max-num-seqs, 64, --enable-prefix-caching]
  note: ours
- {name: 70b, model: Qwen/Qwen3-8B}
"""


def test_a_model_of_the_site_wins_over_one_of_the_catalogue_and_is_listed_first(site, ran, told):
    site("gpu: h100\n", OURS)
    assert 'Serves Qwen/Qwen3-8B as "70b"' in ran(["render", "70b", "--gpu", "h100"]).out
    lines = ran(["models", "8b"]).out.splitlines()
    assert lines[2].split()[:4] == ["Group-8b", "(site)", "8b", "(ours)"]
    (found,) = told("models", "group")
    assert (found["name"], found["aliases"], found["note"]) == ("8b", ["Group-8b"], "ours")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a, modle: b}", "models.yaml:1: unknown setting 'modle'. Did you mean model?"),
        ("- {name: a}", "models.yaml:1: model must be a text"),
        ("- {name: [8], model: b}", "models.yaml:1: name must be one value"),
        ("- {name: a, model: b, vllm_args: {--x: 1}}", "vllm_args must be a list"),
        ("- a", "models.yaml:1 must hold settings"),
        ("a: b", "must be a list of entries"),
        ("- {name: a, model: b}\n- {name: A, model: c}", "A is there twice"),
        ("[", "is not YAML"),
    ],
)
def test_what_cannot_be_in_the_file_is_refused_with_its_place(text, words, site, ran):
    site("gpu: h100\n", text)
    said = ran(["plan", "8b"], 2).err
    assert words in said
    assert "models.yaml" in said
    site("models: /nonexistent/models.yaml\n")
    assert "/nonexistent/models.yaml cannot be read" in ran(["models"], 2).err


def test_models_that_fit_are_planned_with_the_options_of_the_site_s_model(site, told, plan):
    site("gpu: h100\n", "- {name: spread, model: 8b, vllm_args: [--tensor-parallel-size, 4, --max-model-len, 8k]}\n")
    assert [one["layout"] for one in told("models", "spread", "--fits")] == ["TP=4 PP=1"]
    assert plan("spread")["tensor_parallel_size"] == 4
