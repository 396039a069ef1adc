"""Run inside a job by test_serving.py: what a user's own program does. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import hpc_serve.client


def main() -> None:
    client = hpc_serve.client.connect(sys.argv[1], wait=120)
    messages: Any = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model=client.model, messages=messages, max_tokens=8)
    stream = client.chat.completions.create(model=client.model, messages=messages, max_tokens=8, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    print(
        json.dumps(
            {
                "model": client.model,
                "text": answer.choices[0].message.content,
                "tokens": answer.usage.completion_tokens,
                "chunks": len(pieces),
                "streamed": "".join(pieces),
                "models": [model.id for model in client.models.list()],
            }
        )
    )


if __name__ == "__main__":
    main()
