"""Answers a file in OpenAI's Batch format: python examples/batch_jsonl.py SERVICE in.jsonl out.jsonl

A run that was broken off goes on where it was. docs/guides/batch.md says more.
"""

import asyncio
import sys

from hpc_serve import batch


async def main(service: str, requests: str, output: str) -> None:
    async for answer in batch.run(requests, output, service=service):
        print(answer.custom_id, answer.error or "answered")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:]))
