"""Every remedy that `plan`, `render` or `submit` prints is one that the same command takes, and it helps."""

from __future__ import annotations

import random
import re
import shlex

import click
import pytest

from hpc_serve.cli.main import cli, run
from hpc_serve.vllm.arguments import options

Options = dict[str, str]

MODELS = ("8b", "70b", "405b", "deepseek-r1", "gpt-oss-120b", "Qwen/Qwen3-Next-80B-A3B-Instruct")
CHOICES: dict[str, tuple[str, ...]] = {
    "--gpu": ("h100-80gb", "t4", "l4", "a100-40gb", "v6e:1x1", "v5e:2x4", "cpu-spr-2s", "mi300x"),
    "--gpu-memory": ("24GiB", "256GiB"),
    "--nodes": ("1", "2", "3"),
    "--gpus-per-node": ("1", "2", "4", "8"),
    "--concurrency": ("4", "300"),
    "--max-model-len": ("4096", "100000", "auto"),
    "--tensor-parallel-size": ("1", "2", "16"),
    "--pipeline-parallel-size": ("1", "3"),
    "--target": ("tpot=1ms", "throughput"),
    "--replicas": ("2", "3"),
    "--replicas-per-job": ("2",),
    "--cluster": ("local",),
    "--arrivals": ("burst",),
    "--longest-output-tokens": ("400",),
    "--max-num-seqs": ("1", "4096"),
    "--quantization": ("fp8", "int8", "awq"),
    "--kv-cache-dtype": ("fp8",),
    "--dtype": ("bfloat16", "float16"),
    "--keep-up": ("",),
    "--chain": ("3",),
    "--tools": ("",),
    "--no-exclusive": ("",),
}
NOT_OF_PLAN = {"--replicas-per-job", "--cluster", "--keep-up", "--chain", "--tools", "--no-exclusive"}


def words_of(options: Options) -> list[str]:
    return [word for pair in options.items() for word in pair if word]


def requests(command: str, count: int) -> list[Options]:
    """Random requests, some of which fit, most of which do not."""
    chance = random.Random(f"{command} 19")
    sizes = list(CHOICES)[: list(CHOICES).index("--target")]
    others = [name for name in CHOICES if name not in sizes and (command != "plan" or name not in NOT_OF_PLAN)]
    return [
        {"--model": chance.choice(MODELS)}
        | {name: chance.choice(CHOICES[name]) for name in chance.sample(sizes, chance.randint(2, 4))}
        | {name: chance.choice(CHOICES[name]) for name in chance.sample(others, chance.choice((0, 0, 1, 2)))}
        for _ in range(count)
    ]


def options_in(text: str) -> Options:
    words = shlex.split(text.partition(" (")[0])
    return dict(zip(words[::2], words[1::2], strict=True))


def remedies_in(text: str) -> list[Options]:
    """The options that are said to be enough."""
    offers = [
        one
        for found in re.findall(r"(?:would|at once) with (.*)\.$", text, re.MULTILINE)
        for one in found.split("; or ")
    ]
    return [options_in(one) for one in offers if one.startswith("--")]


def advice_in(text: str) -> list[Options]:
    """The options that an error says to use, which may not be enough."""
    return [options_in(found) for found in re.findall(r"(?:use|add|, or) (--[a-z-]+ [\w:.-]*\w)", text)]


def spellings(command: str) -> set[str]:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return {spelling for parameter in found.params for spelling in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("command", "count"), [("plan", 300), ("render", 120), ("submit", 50)])
def test_remedies_are_taken_by_the_command_that_prints_them(command, count, thinned, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    known, seen = spellings(command), set()
    tried = thinned(requests(command, count))
    for asked in tried:
        run([command, *words_of(asked)])
        said = capsys.readouterr()
        for name in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub("`.*?`", "", said.err))) - known:
            assert name in options(), (asked, said.err)
        for remedy in remedies_in(said.out + said.err):
            seen |= set(remedy)
            assert run([command, *words_of(asked | remedy)]) == 0, (asked, remedy, capsys.readouterr().err)
        for advice in advice_in(said.err):
            seen |= set(advice)
            run([command, *words_of(asked | advice)])
            assert capsys.readouterr().err.splitlines()[:1] != said.err.splitlines()[:1], (asked, advice, said.err)
        capsys.readouterr()
    assert len(seen) >= (5 if len(tried) == count else 1), seen


def test_a_slice_is_answered_with_a_slice(plan) -> None:
    remedies = plan("--model", "405b", "--gpu", "v6e:1x1", code=3)["remedies"]
    assert any(text.startswith("--gpu v6e:") for text in remedies)
    assert not any("--nodes" in text for text in remedies)


def test_a_smaller_checkpoint_is_sized_alike_when_it_is_proposed_and_when_it_is_asked_for(plan) -> None:
    asked = ("zai-org/GLM-5.2", "--gpu", "b200", "--tensor-parallel-size", "4", "--pipeline-parallel-size", "1")
    (remedy,) = (text for text in plan(*asked, code=3)["remedies"] if text.startswith("--quantization"))
    assert plan(*asked, *words_of(options_in(remedy)))["fits"]


def test_no_context_is_suggested_that_is_shorter_than_the_requests(plan) -> None:
    def contexts(*words: str) -> list[int]:
        asked = ("8b", "--gpu", "l4", "--nodes", "1", "--gpus-per-node", "1", *words)
        found = (text.split() for text in plan(*asked, code=3)["remedies"])
        return [int(words[1]) for words in found if words[0] == "--max-model-len"]

    (length,) = contexts()
    assert contexts("--input-tokens", str(length - 300), "--output-tokens", "200")
    assert not contexts("--input-tokens", str(length), "--output-tokens", "200")


def test_nodes_are_those_of_all_replicas(plan) -> None:
    asked = ("70b", "--gpu", "l4", "--replicas", "2")
    assert "--quantization fp8 (fp8 weights: TP=8 PP=1)" in plan(*asked, "--nodes", "2", code=3)["remedies"]
    (nodes,) = (text for text in plan(*asked, "--nodes", "2", code=3)["remedies"] if text.startswith("--nodes"))
    sizes = ("--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--gpu", "h100")
    assert plan(*asked, *sizes, "--nodes", "2", code=3)["remedies"] == ["--nodes 4 --gpus-per-node 8 (TP=8 PP=2)"]
    count = options_in(nodes)["--nodes"]
    assert int(count) % 2 == 0
    assert plan(*asked, "--nodes", count)["fits"]
