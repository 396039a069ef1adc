"""Prints the table, or asks a tool anew: `python -m benchmarks.accuracy.other_tools [--ask TOOL=PYTHON]…`."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import DATA
from benchmarks.accuracy.other_tools.questions import memory_rows, speed_questions, speed_rows
from benchmarks.accuracy.other_tools.table import Tool, table
from benchmarks.accuracy.speed_accuracy import every_case, scored_rows
from benchmarks.accuracy.speed_scores import leave_one_out

ANSWERS = DATA / "other_tools.json"
PROGRAMS = {"hf-mem": "hf_mem.py", "kvfit": "kvfit.py", "aiconfigurator": "aiconfigurator.py"}


def tools() -> list[Tool]:
    """What every tool said last."""
    found = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return [Tool(name=name, **found[name]) for name in PROGRAMS if name in found]


def ask(name: str, python: str) -> dict[str, Any]:
    """Have a tool answer all rows. Raises CalledProcessError where its program ends with an error."""
    questions = [row.question for row in memory_rows(with_headers=True)] + list(speed_questions())
    program = Path(__file__).parent / "programs" / PROGRAMS[name]
    done = subprocess.run(
        [python, "-I", str(program)], input=json.dumps(questions), stdout=subprocess.PIPE, text=True, check=True
    )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    answers = {row: _answer(answer) for row, answer in said["answers"].items()}
    return {"version": said["version"], "date": f"{datetime.date.today():%Y-%m-%d}", "answers": answers}


def _answer(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: _kept(value) for name, value in answer.items()}


def _kept(value: Any) -> Any:
    """Six digits of a number. Of a path in a sentence what is below the environment."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return re.sub(r"(?<!\S)/\S*/site-packages/", "", value) if isinstance(value, str) else value


def document(found: dict[str, Any]) -> str:
    """The text of the file: one line for each answer."""
    blocks = []
    for name, one in found.items():
        answers = ",\n".join(f"  {json.dumps(row)}: {json.dumps(answer)}" for row, answer in one["answers"].items())
        head = f'"version": {json.dumps(one["version"])}, "date": {json.dumps(one["date"])}'
        blocks.append(f'"{name}": {{{head}, "answers": {{\n{answers}\n}}}}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(words: Sequence[str] | None = None) -> None:
    """Ask the tools that are named, then print what all of them said last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", action="append", default=[], metavar="TOOL=PYTHON", help="a tool and its Python")
    for asked in parser.parse_args(words).ask:
        name, _, python = asked.partition("=")
        if name not in PROGRAMS or not python:
            parser.error(f"--ask {asked}: write TOOL=PYTHON, with a tool of {', '.join(PROGRAMS)}")
        found = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
        ANSWERS.write_text(document({**found, name: ask(name, python)}), encoding="utf-8")
    scored = scored_rows(leave_one_out(every_case()))
    print(table([*memory_rows(), *speed_rows(scored)], tools()))


if __name__ == "__main__":
    main()
