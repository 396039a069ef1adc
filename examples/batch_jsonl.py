"""Answers each line of a JSONL file, many at once: python examples/batch_jsonl.py SERVICE questions.jsonl answers.jsonl

A line of questions is {"id": …, "prompt": …}, one of answers {"id": …, "answer": …}, in the order in which they come.
A run that was broken off goes on where it was: it leaves out lines that are answered. A line that the service refuses,
such as a prompt that is too long, goes to answers.errors.jsonl as {"id": …, "error": …}; the next run asks it again.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TextIO

import openai

from hpc_serve.client import connect_async

AT_ONCE = 64


def main(service: str, questions: Path, answers: Path) -> None:
    done = {json.loads(line)["id"] for line in whole_lines(answers)} if answers.exists() else set()
    todo = [one for one in map(json.loads, questions.read_text().splitlines()) if one["id"] not in done]
    refused = answers.with_suffix(".errors.jsonl")
    with answers.open("a") as out, refused.open("w") as errors:
        num_refused = asyncio.run(answer_all(service, todo, out, errors))
    print(f"{len(todo) - num_refused} answered, {len(done)} were there")
    if num_refused:
        sys.exit(f"{num_refused} refused: {refused} says why")


def whole_lines(file: Path) -> list[bytes]:
    """Return the lines of a file, and cut off a last one that was not written to its end."""
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(file, len(whole))
    return whole.splitlines()


async def answer_all(service: str, questions: list[dict], out: TextIO, errors: TextIO) -> int:
    """Ask all questions; returns how many were refused."""
    places = asyncio.Semaphore(AT_ONCE)
    async with await connect_async(service, wait=600) as client:

        async def answer(question: dict) -> bool:
            async with places:
                messages = [{"role": "user", "content": question["prompt"]}]
                try:
                    said = await client.chat.completions.create(model=client.model, messages=messages, max_tokens=256)
                except openai.APIStatusError as error:
                    write(errors, {"id": question["id"], "error": error.message})
                    return False
            write(out, {"id": question["id"], "answer": said.choices[0].message.content})
            return True

        return (await asyncio.gather(*map(answer, questions))).count(False)


def write(file: TextIO, line: dict) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
