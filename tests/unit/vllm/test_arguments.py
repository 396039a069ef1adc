"""Words of vLLM's command line and of files of arguments, read one way, and the data of its options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import (
    known_versions,
    load_data,
    names_in,
    options,
    pinned_version,
    read_args_file,
    read_arguments,
    value_of,
    without,
)
from tests.support.vllm_options import as_text, with_later

CC = "--compilation-config"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-tp 8", "--tensor-parallel-size", 8),
        ("-tp=8", "--tensor-parallel-size", 8),
        ("--tensor_parallel_size=8", "--tensor-parallel-size", 8),
        ("-tp 8 --tensor-parallel-size 2", "--tensor-parallel-size", 2),
        ("-dp 2", "--data-parallel-size", 2),
        ("-q fp8", "--quantization", "fp8"),
        ("--max-model-len 32k", "--max-model-len", 32_000),
        ("--max-model-len 32K", "--max-model-len", 32_768),
        ("--max-model-len auto", "--max-model-len", -1),
        ("--seed -1 --port 80", "--port", 80),
        ("--seed -1 --port 80", "--seed", -1),
        ("--enforce-eager", "--enforce-eager", True),
        ("--enforce-eager --no-enforce-eager", "--enforce-eager", False),
        ("-ep", "--enable-expert-parallel", True),
        ("--disable-prefix-caching", "--enable-prefix-caching", False),  # as a later version spells it
        ("--seed 1", "--enforce-eager", None),
        ("--served-model-name a b --port 1", "--served-model-name", ("a", "b")),
        ("--middleware a.b --middleware=c.d", "--middleware", ("a.b", "c.d")),
        ("--device-memory-utilization 0.5", "--gpu-memory-utilization", 0.5),
        ("--kv-cache-memory-bytes None", "--kv-cache-memory-bytes", None),
        ("-O3", "--optimization-level", "3"),
        ("-O 2", "--optimization-level", "2"),
        ("-cc.mode 3 -cc.custom_ops+ a,b -cc.custom_ops+=c", CC, {"mode": 3, "custom_ops": ["a", "b", "c"]}),
        ("--compilation-config.mode 3 -cc.backend x", CC, {"backend": "x"}),
        ("--compilation_config.pass_config.x 8k", CC, {"pass_config": {"x": 8000}}),
        ("""--compilation-config '{"max_cudagraph_capture_size": 1k}'""", CC, {"max_cudagraph_capture_size": 1000}),
        ("""--hf-overrides '{"a": "8k"}'""", "--hf-overrides", {"a": "8k"}),
    ],
)  # fmt: skip
def test_an_option_is_read_in_each_of_its_spellings(line: str, name: str, value: Any) -> None:
    assert value_of(read_arguments(shlex.split(line)), name) == value


def test_every_word_is_in_one_argument_and_in_order() -> None:
    line = "x --served-model-name a b --foo 1 2 --hf-overrides.a --seed -1 --no-such -1"
    words = line.split()
    arguments = read_arguments(words)
    assert [word for argument in arguments for word in argument.words] == words
    spellings = [argument.spelling for argument in arguments]
    assert spellings == ["", "--served-model-name", "--foo", "--hf-overrides", "--no-such"]


def test_what_a_person_says_again_is_left_out_of_the_plan_s() -> None:
    plan = ["--tensor-parallel-size", "8", "--max-model-len", "8192", "--enforce-eager"]
    assert without(plan, names_in(["-tp=4", "--no-enforce-eager"])) == ("--max-model-len", "8192")


def test_a_file_of_arguments_has_comments_and_quotes_as_a_shell_has() -> None:
    assert read_args_file("# --load-format dummy\n--seed 1 # dummy\n--served-model-name 'a # b'") == (
        *("--seed", "1", "--served-model-name", "a # b"),
    )
    with pytest.raises(InvalidRequestError, match=r"hpc-serve-args.txt cannot be read"):
        read_args_file("--served-model-name 'a")


# -- the data of a later vLLM holds what differs from the pinned version

SEED: dict[str, Any] = {"names": ["--seed"], "values": "1", "kind": "integer"}
EAGER: dict[str, Any] = {"names": ["--eager"], "values": "0", "kind": "switch", "negated": ["--no-eager"]}
KIND: dict[str, Any] = {"names": ["--kind"], "values": "1", "kind": "text", "choices": ["a", "b"]}


def test_what_differs_is_stored_and_a_second_run_replaces_it() -> None:
    pinned = {"version": "1.0", "options": [SEED, EAGER, KIND]}
    any_kind = {key: value for key, value in KIND.items() if key != "choices"}
    new = {"names": ["--new"], "values": "0", "kind": "switch"}
    once = with_later(pinned, "1.10.0", [SEED, any_kind, new])
    (later,) = once["later"]
    assert later == {"version": "1.10.0", "gone": ["--eager"], "options": [{"names": ["--kind"], "choices": None}, new]}
    twice = with_later(with_later(once, "1.10.0", [SEED, EAGER, KIND]), "1.9.0", [SEED, EAGER, KIND, new])
    assert [(one["version"], len(one["options"])) for one in twice["later"]] == [("1.9.0", 1), ("1.10.0", 0)]


def test_the_file_is_as_the_program_writes_it() -> None:
    file = Path(__file__).parents[3] / "hpc_serve/vllm/data/options.json"
    assert file.read_text(encoding="utf-8") == as_text(load_data("options.json"))


def test_no_pinned_option_is_stored_again() -> None:
    pinned = {entry["names"][0]: entry for entry in load_data("options.json")["options"]}
    for later in load_data("options.json")["later"]:
        assert all(pinned.get(entry["names"][0]) != entry for entry in later["options"])


def test_every_known_version_has_the_options_that_the_launcher_adds() -> None:
    added = ("--host", "--port", "--middleware", "--ssl-keyfile", "--ssl-certfile", "--shutdown-timeout", "--nnodes")
    assert known_versions()[0] == pinned_version()
    for version in known_versions():
        assert set(added) <= set(options(version))
