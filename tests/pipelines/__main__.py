"""Pipelines of others through the gateway: python -m tests.pipelines [--lm-eval PYTHON] [--ray PYTHON]

Each asks two stub engines by examples/through_gateway.sh, with packages of its own: `lm_eval[api]` and `ray[data,llm]`
in the environments that the two Pythons are of. One of the two engines is killed once a quarter of the questions is
asked. Prints a table; tests/pipelines/RESULTS.md holds the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.stub_engine import chat_context, greedy_answer
from tests.support.stubs import StubService

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTIONS = [f"Question {number}?" for number in range(80)]
WORDS = 4
WITHIN_S = 1200.0
TASK = """\
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
LM_EVAL = (
    "lm_eval --model local-chat-completions --apply_chat_template --tasks counting --include_path {folder} "
    "--output_path {folder}/results --model_args "
    '"model=405b,base_url=$OPENAI_BASE_URL/chat/completions,num_concurrent=8,tokenizer_backend=None"'
)


def right_answer(question: str) -> str:
    return greedy_answer(chat_context([{"role": "user", "content": question}]), WORDS)


def ask_by_lm_eval(folder: Path) -> tuple[list[str], Callable[[], int]]:
    """Return the command, and what counts the right answers after it."""
    (folder / "counting.yaml").write_text(TASK.format(data=folder / "prompts.jsonl"))

    def count() -> int:
        (results,) = (folder / "results").rglob("results_*.json")
        share = json.loads(results.read_text())["results"]["counting"]["exact_match,none"]
        return round(share * len(QUESTIONS))

    return ["bash", "-c", LM_EVAL.format(folder=folder)], count


def ask_by_ray(folder: Path) -> tuple[list[str], Callable[[], int]]:
    def count() -> int:
        lines = [line for file in (folder / "answers").glob("*.json") for line in file.read_text().splitlines()]
        answers = {found["prompt"]: found["answer"] for found in map(json.loads, lines)}
        assert len(lines) == len(answers), "a prompt is there twice"
        return sum(answers.get(question) == right_answer(question) for question in QUESTIONS)

    words = [str(EXAMPLES / "ray_data.py"), "405b", str(folder / "prompts.jsonl"), str(folder / "answers")]
    return ["python", *words], count


def run(name: str, python: Path, package: str, ask: Callable[[Path], tuple[list[str], Callable[[], int]]]) -> str:
    """Run a pipeline while an engine is killed; return its line of the table."""
    with tempfile.TemporaryDirectory(prefix="hpc-serve-pipelines-") as made:
        folder = Path(made)
        lines = [json.dumps({"prompt": question, "answer": right_answer(question)}) for question in QUESTIONS]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        version = subprocess.run(
            [python, "-c", f"import importlib.metadata as it; print(it.version({package!r}))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        service = StubService(folder / "home")
        try:
            flags = ("--stub-greedy", "--stub-word-s", "0.25", "--stub-slots", "4", "--stub-work-log", str(folder))
            engines = [service.start(*flags) for _ in range(2)]
            command, count = ask(folder)
            environ = {
                **os.environ,
                "PATH": f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HPC_SERVE_HOME": str(folder / "home"),
                "HF_HOME": str(folder / "hub"),
                "HF_HUB_OFFLINE": "1",
                "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_raylet_start_wait_time_s": "600",  # a busy machine
            }
            with (folder / "log").open("w+") as log:
                argv = ["bash", str(EXAMPLES / "through_gateway.sh"), "405b", *command]
                began = subprocess.Popen(argv, env=environ, cwd=folder, stdout=log, stderr=log)
                _wait_until(lambda: _begun(folder) >= len(QUESTIONS) // 4 or began.poll() is not None)
                engines[0].kill()
                status = began.wait(WITHIN_S)
                log.seek(0)
                assert status == 0, log.read()
            return f"| {name} {version} | {len(QUESTIONS)} | {count()} | {_begun(folder) - len(QUESTIONS)} |"
        finally:
            service.close()


def _begun(folder: Path) -> int:
    return sum(file.read_text().count('"begun"') for file in folder.glob("*.jsonl"))


def _wait_until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < ends_s, "the pipeline has not begun"
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines", description=__doc__)
    parser.add_argument("--lm-eval", type=Path, metavar="PYTHON", help="has lm_eval[api]")
    parser.add_argument("--ray", type=Path, metavar="PYTHON", help="has ray[data,llm]")
    options = parser.parse_args()
    print("| pipeline | questions | answered right | asked again at the other engine |\n|---|---|---|---|", flush=True)
    if options.lm_eval:
        print(run("lm-evaluation-harness", options.lm_eval, "lm_eval", ask_by_lm_eval), flush=True)
    if options.ray:
        print(run("Ray Data", options.ray, "ray", ask_by_ray), flush=True)


if __name__ == "__main__":
    main()
