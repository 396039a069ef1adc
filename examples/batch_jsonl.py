"""Answers each line of a JSONL file, many at once: python examples/batch_jsonl.py SERVICE questions.jsonl answers.jsonl

A line of questions is {"id": …, "prompt": …}, one of answers {"id": …, "answer": …}, in the order in which they come.
Lines that are answered already are left out, so that a run that was broken off goes on where it was.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import TextIO

from hpc_serve.client import connect_async

AT_ONCE = 64


def main(service: str, questions: Path, answers: Path) -> None:
    done = {json.loads(line)["id"] for line in answers.read_text().splitlines()} if answers.exists() else set()
    todo = [one for one in map(json.loads, questions.read_text().splitlines()) if one["id"] not in done]
    with answers.open("a") as out:
        asyncio.run(answer_all(service, todo, out))
    print(f"{len(todo)} answered, {len(done)} were there")


async def answer_all(service: str, questions: list[dict], out: TextIO) -> None:
    places = asyncio.Semaphore(AT_ONCE)
    async with await connect_async(service, wait=600) as client:

        async def answer(question: dict) -> None:
            async with places:
                messages = [{"role": "user", "content": question["prompt"]}]
                said = await client.chat.completions.create(model=client.model, messages=messages, max_tokens=256)
            out.write(json.dumps({"id": question["id"], "answer": said.choices[0].message.content}) + "\n")
            out.flush()

        await asyncio.gather(*map(answer, questions))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
