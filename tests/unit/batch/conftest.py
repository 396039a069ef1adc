"""A service of stub engines, and files of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stubs import StubEngine, StubService
from tests.unit.client.conftest import stub_services


class SmallService(StubService):
    """A service of replicas that each take eight requests at once."""

    def start(self, *flags: str, **fields: Any) -> StubEngine:
        return super().start(*flags, predicted={"max_num_seqs": 8.0}, **fields)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubService]:
    with stub_services(tmp_path, monkeypatch, SmallService) as make:
        yield make()


@pytest.fixture
def serving(service: StubService) -> StubService:
    """That service with one replica."""
    service.start()
    return service


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where the answers go."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    """Where the lines without an answer go."""
    return tmp_path / "out.errors.jsonl"


def request_line(custom_id: str, text: str = "What?", **changes: object) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    usual = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps({**usual, **changes})


@pytest.fixture
def requests(tmp_path: Path) -> Callable[..., Path]:
    """Writes so many requests, or these lines."""

    def write(lines: int | list[str], end: str = "\n") -> Path:
        path = tmp_path / "in.jsonl"
        texts = [request_line(f"q{n}") for n in range(lines)] if isinstance(lines, int) else lines
        path.write_bytes(end.join([*texts, ""]).encode())
        return path

    return write
