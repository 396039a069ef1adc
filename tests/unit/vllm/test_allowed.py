"""What may be given to the engine, and from where."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import (
    known_versions,
    load_data,
    nearest_version,
    options,
    pinned_version,
)
from hpc_serve.vllm.command import check_arguments, check_file_arguments, options_of_others

CLASSES = load_data("classes.json")
LINES = json.loads(Path(__file__).with_name("command_lines.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *((line, "cannot be given to the engine") for line in LINES["is refused"]),
        *((line, "holds a password or a token") for line in LINES["holds a credential"]),
    ],
)
def test_some_words_are_refused_wherever_they_come_from(line: str, why: str) -> None:
    for check in (
        partial(check_arguments, allow_unknown=False),
        partial(check_arguments, allow_unknown=True),
        check_file_arguments,
    ):
        with pytest.raises(InvalidRequestError, match=why) as refused:
            check(line.split())
        assert "k3y" not in str(refused.value)


def test_what_only_looks_like_a_credential_may_be_given() -> None:
    for line in (
        "--otlp-traces-endpoint http://collector:4317",
        "--served-model-name team/hf-DeepSeek-R1-Distill-Qwen-32B-quantized-w4a16-v2",
        '--hf-overrides {"pad_token":"<|endoftext|>"}',
        "--chat-template /data/users@site/a:b.jinja",
    ):
        check_arguments(line.split(), allow_unknown=False)


@pytest.mark.parametrize("line", [*LINES["names code"], *LINES["opens the engine"]])
def test_what_names_code_or_opens_the_engine_comes_from_its_owner_only(line: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^hpc-serve-args.txt holds "):
        check_file_arguments(line.split())
    check_arguments(line.split(), allow_unknown=line in LINES["names code"])


@pytest.mark.parametrize(
    "line",
    [
        "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 8 --kv-cache-memory-bytes 16777216 --enforce-eager",
        "--load-format dummy --tensor-parallel-size 2 -cc.mode 0 -cc.cudagraph_mode NONE --seed 1",
        '--compilation-config {"mode":0} --model-loader-extra-config.num_threads 4 -dp 1',
    ],
)
def test_what_tests_and_demos_need_may_stand_in_a_file(line: str) -> None:
    check_file_arguments(line.split())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--disable-log-requests", "--disable-log-requests: requests are not logged unless --enable-log-requests"),
        ("--max-modle-len 3", "has no option --max-modle-len: did you mean --max-model-len?"),
        ("--no-such-option", "--no-such-option (for another version of vLLM: --allow-unknown-vllm-options)"),
        ("--max-num-seq 4", "--max-num-seq is not the full name of an option: write --max-num-seqs"),
        ("-t 4", "write --tensor-parallel-size"),
        ("-qfp8", "write --quantization"),
        ("--kv-cache-dtype int8", "--kv-cache-dtype is 'int8': vLLM 0.32.0 takes auto,"),
        ("--enforce-eager=True", "--enforce-eager takes no value: write it alone, or --no-enforce-eager"),
        ("--enforce-eager True", "True after --enforce-eager belongs to no option"),
        ("--served-model-name=a b", "b after --served-model-name=a belongs to no option"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--max-num-seqs many", "--max-num-seqs is 'many': it must be a whole number"),
        ("--compilation-config {", "it must be JSON"),
        ("x", "'x' belongs to no option"),
    ],
)  # fmt: skip
def test_what_the_pinned_version_does_not_take_is_refused_unless_overruled(line: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        check_arguments(line.split(), allow_unknown=False)
    if line != "-t 4":  # the launcher reads the layout, so it must see it
        check_arguments(line.split(), allow_unknown=True)


@pytest.mark.parametrize(
    ("line", "version", "why"),
    [
        # None: in a script, where the launcher would misread them
        ("--tensor-par 4", None, "write --tensor-parallel-size"),
        ("--served-model x", None, "write --served-model-name"),
        ("--max-num-seqs 4 -- x", None, "`--` ends the options"),
        ("--served-model-name.x y", None, "takes no JSON"),
        ("--hf-overrides.a --seed 1", None, "write --hf-overrides.a=VALUE"),
        ("--served-model-name a --hf-overrides.a 1 b", None, "b after --hf-overrides.a belongs to no option"),
        ("--port 80 -0.5 --seed", None, "write -0.5=VALUE"),
        ("--monokernel", "", "vLLM 0.32.0 has no option --monokernel, 0.33.0 has it"),
        ("--monokernel", "0.32.0", "vLLM 0.32.0 has no option --monokernel, 0.33.0 has it"),
        ("--disable-prefix-caching", "0.20.0", "vLLM 0.32.0 has no option --disable-prefix-caching, 0.33.0 has it"),
        ("--gdn-prefill-backend sycl", "0.32.0", "vLLM 0.32.0 takes aiter_flydsl,"),
        ("--gdn-prefill-backend new", "0.33.0", "vLLM 0.33.0 takes aiter_flydsl, cutedsl, flashinfer, sycl,"),
        ("--no-such-option", "0.34.0", "vLLM 0.33.0 has no option --no-such-option"),
    ],
)
def test_what_the_launcher_misreads_or_a_version_lacks_is_refused(line: str, version: str | None, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        check_arguments(line.split(), allow_unknown=version is None, version=version or "")


@pytest.mark.parametrize(
    "line", ["--device cpu", "--swap-space 4", "--new-option a b", "--kv-cache-dtype new", "-zz 1"]
)
def test_another_version_s_options_pass_in_a_script(line: str) -> None:
    check_arguments(line.split(), allow_unknown=True)


def test_every_option_of_the_pinned_version_has_one_class() -> None:
    listed = [name for kind in ("free", "owner", "ours", "refused", "only_one") for name in CLASSES[kind]]
    assert sorted(listed) == sorted({option.name for option in options().values()})


def test_free_keys_are_of_free_json_options() -> None:
    for name in CLASSES["free_keys"]:
        assert name in CLASSES["free"]
        assert options()[name].takes_json


def test_successors_are_of_options_that_are_gone_and_name_those_that_are_there() -> None:
    for gone, advice in CLASSES["successors"].items():
        assert gone not in options(pinned_version())
        for name in re.findall(r"(?<![\w-])--[a-z0-9-]+", advice):
            assert name in options() or name == "--backend", f"{gone}: {advice}"


def test_no_free_option_has_a_name_that_tells_of_code() -> None:
    telling = re.compile(
        r"plugin|-cls$|-class|-code$|middleware|trust|token$|-key$|ssl|uds|grpc|data-parallel-(?!size$|hybrid-lb$)|nnodes"
    )
    assert not {name for name in CLASSES["free"] if telling.search(name)}


def test_a_value_of_another_version_is_refused_with_the_switch_that_lets_it_pass() -> None:
    with pytest.raises(InvalidRequestError, match=r"--lora-dtype is 'new'.* --allow-unknown-vllm-options"):
        check_arguments(["--lora-dtype", "new"], allow_unknown=False)
    check_arguments(["--lora-dtype", "new"], allow_unknown=True)


@pytest.mark.parametrize("version", ["0.33", "0.33.0", "0.33.1", "0.34.0"])
def test_options_of_a_later_version_pass_for_it_and_what_is_newer(version: str) -> None:
    words = "--monokernel --disable-prefix-caching --kv-cache-dtype octave_k3v4 --gdn-prefill-backend sycl -ep"
    check_arguments(words.split(), allow_unknown=False, version=version)


def test_a_later_version_has_the_pinned_options_but_for_what_differs() -> None:
    """The differences alone are stored."""
    later = options(known_versions()[-1])
    assert len(later) > len(options(pinned_version()))
    assert later["--max-num-seqs"].kind == options(pinned_version())["--max-num-seqs"].kind == "integer"
    assert options(pinned_version())["--kv-cache-dtype"].choices
    assert not later["--kv-cache-dtype"].choices
    assert nearest_version("0.31.2") == pinned_version()


def test_options_that_an_installed_version_lacks_are_named() -> None:
    words = ["--monokernel", "--disable-eplb", "--seed", "1", "--of-a-stand-in", "x"]
    assert dict(options_of_others(words, "0.32.0+cpu")) == {"--monokernel": "0.33.0", "--disable-eplb": "0.33.0"}
    assert not dict(options_of_others(words, "0.33.0"))
