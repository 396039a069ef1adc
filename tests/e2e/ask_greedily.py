"""Run as a user by test_real_data_parallel.py: asks a service greedily, so many requests at a time.

    python tests/e2e/ask_greedily.py SERVICE AT_ONCE

It prints the answers, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import hpc_serve.client

PROMPTS = (
    "The people of the place",
    "one two can you",
    "people my than first",
    "so many words are",
    "what",
    "they say",
)


def main() -> None:
    client = hpc_serve.client.connect(sys.argv[1], wait=120)

    def ask(prompt: str) -> str:
        answer = client.completions.create(
            model=client.model, prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(int(sys.argv[2])) as threads:
        print(json.dumps(list(threads.map(ask, PROMPTS))))


if __name__ == "__main__":
    main()
