"""Ask a service by one way in, as a user's program does: `python ask_every_way.py WAY SERVICE PROMPT [FILE]`.

It prints "answered" and ends with 0, or prints what was said and ends with 1. `kept` asks, says so, waits until FILE is
there, and asks again over the same client.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

from hpc_serve.client import connect, connect_async
from hpc_serve.errors import HpcServeError


def asked(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4}


def ask(client: Any, prompt: str) -> None:
    assert client.chat.completions.create(model=client.model, **asked(prompt)).choices


async def ask_async(service: str, prompt: str) -> None:
    client = await connect_async(service, max_retries=0)
    assert (await client.chat.completions.create(model=client.model, **asked(prompt))).choices


def chat(service: str, prompt: str) -> None:
    done = subprocess.run(["hpc-serve", "chat", service, prompt, "--max-tokens", "4"], capture_output=True, text=True)
    if done.returncode != 0:
        raise HpcServeError(done.stderr.strip())


def ask_again(service: str, prompt: str, file: str) -> None:
    client = connect(service, max_retries=0)
    ask(client, prompt)
    print("answered once", flush=True)
    while not Path(file).exists():
        time.sleep(0.05)
    ask(client, prompt)


def main(way: str, service: str, prompt: str, *file: str) -> int:
    try:
        if way == "sync":
            ask(connect(service, max_retries=0), prompt)
        elif way == "async":
            asyncio.run(ask_async(service, prompt))
        elif way == "chat":
            chat(service, prompt)
        else:
            ask_again(service, prompt, *file)
    except (HpcServeError, openai.OpenAIError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print("answered")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
