"""Every suggestion that `plan` prints, typed back in place of what it replaces, is accepted, and the model fits."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from hpc_serve.cli.main import run

Options = dict[str, str]

MODELS = ("8b", "70b", "405b", "deepseek-r1", "Qwen/Qwen3-Next-80B-A3B-Instruct")
MACHINES: tuple[Options, ...] = (
    {"--gpu": "h100-80gb", "--nodes": "1"},
    {"--gpu": "t4", "--nodes": "1", "--gpus-per-node": "1"},
    {"--gpu": "a100-40gb", "--nodes": "2", "--gpus-per-node": "4"},
    {"--gpu": "v6e:1x1"},
    {"--gpu": "v5e:2x4"},
    {"--gpu": "v5p", "--nodes": "2"},
    {"--gpu": "cpu-spr-2s", "--gpu-memory": "24GiB"},
    {"--gpu": "cpu-genoa", "--gpu-memory": "8GiB", "--nodes": "1"},
)
ASKED: tuple[Options, ...] = (
    {},
    {"--concurrency": "40"},
    {"--max-model-len": "16384", "--input-tokens": "6000", "--output-tokens": "200"},
    {"--tensor-parallel-size": "2"},
    {"--tensor-parallel-size": "4", "--pipeline-parallel-size": "3"},
    {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2"},
    {"--pipeline-parallel-size": "16"},
    {"--replicas": "2"},
    {"--replicas": "2", "--tensor-parallel-size": "16", "--max-num-seqs": "1024"},
    {"--kv-cache-dtype": "fp8", "--enforce-eager": ""},
)


def planned(options: Options) -> tuple[int, dict[str, Any], str]:
    """(exit code, document, error) of `plan --json` with these options."""
    words = [word for pair in options.items() for word in pair if word]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["plan", *words, "--json"])
    return code, json.loads(out.getvalue() or "{}"), err.getvalue()


def options_in(text: str) -> Options:
    """The options at the start of a suggestion, up to what it gives."""
    words = shlex.split(text.partition(" (")[0])
    assert words[::2], text
    assert all(word.startswith("--") for word in words[::2]), text
    return dict(zip(words[::2], words[1::2], strict=True))


def machines_in(reasons: list[str]) -> list[Options]:
    """The options that a refusal names: `use --nodes 2, or smaller sizes`."""
    return [options_in(found) for reason in reasons for found in re.findall(r"use (--(?:nodes|gpu) [^\s,]+)", reason)]


def cases() -> Iterator[Options]:
    for name, machines, asked in itertools.product(MODELS, MACHINES, ASKED):
        yield {"--model": name, **machines, **asked}


@pytest.mark.parametrize("name", MODELS)
def test_suggestions_are_accepted_and_fit(name: str, thinned: Any) -> None:
    tried = 0
    asked = [one for one in cases() if one["--model"] == name]
    some = thinned(asked)
    for options in some:
        code, document, error = planned(options)
        assert code in (0, 2, 3), (options, error)
        for text in document.get("remedies", ()):
            tried += 1
            again, fits, said = planned(options | options_in(text))
            assert (again, said) == (0, ""), (options, text, said, fits.get("reasons"))
            assert fits["fits"], (options, text)
        for machines in machines_in(document.get("reasons", [])):
            again, found, said = planned(options | machines)
            assert again in (0, 3), (options, machines, said)
            assert found["candidates"], (options, machines, found["reasons"])  # its layout was looked at
            tried += 1
    assert tried >= (5 if some == asked else 1)


def test_a_slice_is_answered_with_a_slice() -> None:
    code, document, _ = planned({"--model": "405b", "--gpu": "v6e:1x1"})
    assert code == 3
    assert any(text.startswith("--gpu v6e:") for text in document["remedies"])
    assert not any("--nodes" in text for text in document["remedies"])


def test_no_context_is_suggested_that_is_shorter_than_the_requests() -> None:
    asked = {"--model": "8b", "--gpu": "l4", "--nodes": "1", "--gpus-per-node": "1"}
    _, document, _ = planned(asked)
    (length,) = (int(text.split()[1]) for text in document["remedies"] if text.startswith("--max-model-len"))
    for tokens, is_suggested in ((length - 300, True), (length, False)):
        _, document, _ = planned(asked | {"--input-tokens": str(tokens), "--output-tokens": "200"})
        assert any(text.startswith("--max-model-len") for text in document["remedies"]) == is_suggested


def test_nodes_are_those_of_all_replicas() -> None:
    asked = {"--model": "70b", "--gpu": "l4", "--nodes": "2", "--replicas": "2"}
    code, document, _ = planned(asked)
    assert code == 3
    (nodes,) = (text for text in document["remedies"] if text.startswith("--nodes"))
    assert int(options_in(nodes)["--nodes"]) % 2 == 0
    assert planned(asked | options_in(nodes))[0] == 0
