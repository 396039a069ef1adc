"""Answers a file of requests in OpenAI's Batch format with a service, and survives the end of any part.

    import asyncio

    from hpc_serve import batch

    async def main() -> None:
        async for answer in batch.run("in.jsonl", "out.jsonl", service="70b"):
            print(answer.custom_id, answer.progress.answered)

    asyncio.run(main())

The same call goes on where a run was broken off. docs/guides/batch.md says more.
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve.batch.answer_files import Answer, Progress, merge
    from hpc_serve.batch.send import run

__all__ = ["Answer", "Progress", "merge", "run"]

if not TYPE_CHECKING:
    _PLACES = {"merge": "answer_files", "Answer": "answer_files", "Progress": "answer_files", "run": "send"}
    __getattr__, __dir__ = lazy_names(__name__, _PLACES)
