"""The data and the reader against the installed vLLM: its options, its reading of words, and where it puts ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import load_data, options, read_arguments, value_of
from hpc_serve.vllm.command import GATE, check_arguments, headless_argv, read_command, server_args
from tests.support.moe_model import CONFIGS
from tests.unit.vllm.conftest import Ask, of_node, read

PORT = 9123
OF_FILE = json.loads(Path(__file__).with_name("command_lines.json").read_text(encoding="utf-8"))
COMPLETED = OF_FILE["vLLM completes"]
LINES = [*OF_FILE["vLLM takes"], *OF_FILE["vLLM refuses"], *COMPLETED]
NAMES = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--max-num-seqs", "--port", "--seed"),
    *("--max-num-batched-tokens", "--kv-cache-memory-bytes", "--block-size", "--gpu-memory-utilization", "--dtype"),
    *("--quantization", "--kv-cache-dtype", "--enforce-eager", "--enable-expert-parallel", "--served-model-name"),
    *("--distributed-executor-backend", "--hf-overrides", "--limit-mm-per-prompt", "--optimization-level"),
    *("--moe-backend", "--enable-prefix-caching", "--safetensors-load-strategy", "--load-format"),
)
"""Options whose values are plain, so that both readings can be compared."""
OURS = ("full name", "cannot be given", "has no keys", "`--` ends")
"""What hpc-serve refuses although vLLM would take it."""
MIDDLEWARE = (
    "--middleware starlette.middleware.gzip.GZipMiddleware",
    "--middleware=starlette.middleware.gzip.GZipMiddleware --middleware starlette.middleware.trustedhost."
    "TrustedHostMiddleware --enable-request-id-headers",
    "--seed 1",
)
SEED = 20261121


def random_lines(count: int) -> list[list[str]]:
    """Words that may meet in any order: spellings whole, shortened, with values of all kinds or none."""
    rng = random.Random(SEED)
    spellings = [spelling for name in NAMES for spelling in (*options()[name].names, *options()[name].negated)]
    values = ["1", "8", "7", "-1", "0.5", "-0.5", "16k", "auto", "fp8", "x", "None", "", '{"a":1}', "a b", "-", "="]
    values.append("-a b")

    def word() -> list[str]:
        spelling = rng.choice(spellings)
        if rng.random() < 0.1:
            spelling = spelling[: rng.randint(2, len(spelling))]
        if rng.random() < 0.2:
            spelling = spelling.replace("-", "_").replace("__", "--", 1)
        if rng.random() < 0.1:
            spelling += ".key"
        if rng.random() < 0.3:
            return [f"{spelling}={rng.choice(values)}"]
        return [spelling, *rng.choices(values, k=rng.choice((0, 1, 1, 1, 2)))]

    return [[part for _ in range(rng.randint(1, 4)) for part in word()] for _ in range(count)]


WORDS = [*(line.split() for line in LINES), *random_lines(1500)]


def gated(line: str) -> list[str]:
    """The words of the engine as the head starts it."""
    command = read_command(["vllm", "serve", "model", *line.split()])
    return [*command.argv[3:], *server_args(command, tls_files=("/run/endpoint.key", "/run/endpoint.pem"))]


def refusal_of(words: list[str]) -> str:
    try:
        check_arguments(words, allow_unknown=False)
    except InvalidRequestError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def vllm(ask_vllm: Ask) -> Any:
    return ask_vllm("vllm_parser", {"lines": [*WORDS, gated(f"--port {PORT}"), *map(gated, MIDDLEWARE)]})


def test_the_committed_options_are_those_of_the_installed_vllm(vllm):
    data = load_data("options.json")
    assert data["version"] == vllm["version"], "made for another version: python -m tests.support.vllm_options"
    assert {option["names"][0]: option for option in data["options"]} == {
        option["names"][0]: option for option in vllm["options"]
    }


def test_what_is_accepted_is_read_as_vllm_reads_it(vllm):
    accepted = 0
    for words, reading in zip(WORDS, vllm["readings"]):
        if refusal_of(words):
            continue
        accepted += 1
        assert reading is not None, f"vLLM refuses {words} (seed {SEED})"
        arguments = read_arguments(words)
        for name in NAMES:
            if any(argument.name == name for argument in arguments):
                value = value_of(arguments, name)
                ours = list(value) if isinstance(value, tuple) else value
                assert ours == reading[name[2:].replace("-", "_")], f"{name} in {words} (seed {SEED})"
    assert accepted > 100


def test_what_vllm_takes_is_accepted_but_for_abbreviations(vllm):
    for words, reading in zip(WORDS, vllm["readings"]):
        # Words with keys take the next word, whatever it is, and are read last; -0.5 is one, the key 5 of an option -0.
        if reading is None or any("." in word for word in words):
            continue
        refusal = refusal_of(words)
        assert not refusal or any(part in refusal for part in OURS), f"{words}: {refusal} (seed {SEED})"


def test_vllm_completes_abbreviations_and_we_refuse_them(vllm):
    readings = dict(zip(LINES, vllm["readings"]))
    assert all(readings[line] is not None for line in COMPLETED)
    assert readings["--tensor 4"]["tensor_parallel_size"] == 4
    for line in COMPLETED:
        with pytest.raises(InvalidRequestError, match=r"full name|cannot be given"):
            check_arguments(line.split(), allow_unknown=False)


def test_vllm_itself_binds_any_port_of_the_loopback_address(vllm):
    """The launcher listens on the one that a person has named."""
    readings = vllm["readings"][-1 - len(MIDDLEWARE) :]
    assert {(reading["host"], reading["port"]) for reading in readings} == {("127.0.0.1", 0)}


def test_the_gate_is_around_all_other_middleware(vllm):
    found = vllm["middleware"][-len(MIDDLEWARE) :]
    assert all(one[0] == GATE and one.count(GATE) == 1 for one in found)
    assert found[0][1] == "starlette.middleware.gzip.GZipMiddleware"
    assert "starlette.middleware.trustedhost.TrustedHostMiddleware" in found[1]


# -- where data-parallel ranks are, by the words that each node of a job is given

# By the line, the nodes and the backend: of each node that runs a command the first data-parallel rank, how many there
# are, the node's place within a rank, vLLM's backend, and who balances. vLLM calls a hybrid of one rank each external.
CASES: dict[tuple[str, int, str], list[list[Any]]] = {
    ("-dp 2 -tp 2", 1, "mp"): [[0, 2, 0, "mp", "internal"]],
    ("-dp 4", 2, "mp"): [[0, 2, 0, "mp", "internal"], [2, 2, 0, "mp", "internal"]],
    ("-dp 2 -tp 4", 4, "mp"): [[rank, 1, place, "mp", "internal"] for rank in (0, 1) for place in (0, 1)],
    ("-dp 4 --data-parallel-hybrid-lb", 2, "mp"): [[0, 2, 0, "mp", "hybrid"], [2, 2, 0, "mp", "hybrid"]],
    ("-dp 2 --data-parallel-hybrid-lb", 2, "mp"): [[0, 1, 0, "mp", "external"], [1, 1, 0, "mp", "external"]],
    ("-dp 4", 2, "ray"): [[0, 2, 0, "ray", "internal"]],
}


def words_of_nodes(line: str, num_nodes: int, backend: str, model: Path) -> list[list[str]]:
    command, found = read(f"{model} {line}"), []
    file = str(model / "engine.yaml")
    for node in range(num_nodes if backend == "mp" else 1):
        told = of_node(f"{model} {line}", backend=backend, num_nodes=num_nodes, rank=node, file=file)
        argv = headless_argv(command) if "--headless" in told else command.argv
        found.append([*argv[2:], *told])
    return found


def test_vllm_puts_ranks_where_the_layout_has_them(
    ask_vllm: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2-moe"]))
    (tmp_path / "engine.yaml").write_text("master-port: 20001\ndata-parallel-rpc-port: 20002\n")
    lines = [words for case in CASES for words in words_of_nodes(*case, tmp_path)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask_vllm("vllm_ranks", lines) == [node for nodes in CASES.values() for node in nodes]
