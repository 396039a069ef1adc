"""An answer of a batch as it is written and yielded, and how far a batch is. Pure values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """How far a batch is. `answered` and `failed` count lines of this run.

    `before` lines were done by earlier runs; `failed_before` of them are in the errors file.
    Of the `total` lines, `in_flight` are under way, and at most `window` may be. `gpu_hours` are those of the service's
    replicas during this run. `serving_s` are the seconds since the service was ready; `stage` says what is done.
    """

    total: int = 0
    before: int = 0
    failed_before: int = 0
    answered: int = 0
    failed: int = 0
    in_flight: int = 0
    window: int = 0
    replicas: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    gpu_hours: float = 0.0
    serving_s: float = 0.0
    stage: str = "reads the requests"

    @property
    def left(self) -> int:
        return self.total - self.before - self.answered - self.failed

    @property
    def tokens_per_s(self) -> float | None:
        """Return generated tokens a second, prompt tokens where nothing is generated; None before the first answer."""
        tokens = self.generated_tokens or self.prompt_tokens
        return tokens / self.serving_s if tokens and self.serving_s else None

    @property
    def left_s(self) -> float | None:
        """Return the seconds left at the rate of this run; None before its first answer."""
        done = self.answered + self.failed
        return self.left * self.serving_s / done if done else None

    def count_tokens(self, body: Any) -> None:
        """Add the tokens that an answer says it took."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self.generated_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one line, or its failure. `error` is None for an answer with status 200.

    `status` is None if no engine answered. `body` is the engine's, `progress` that of the batch after this answer.
    """

    line: int
    custom_id: str
    status: int | None = None
    request_id: str = ""
    body: Any = None
    error: Mapping[str, str] | None = None
    progress: Progress

    @property
    def json_line(self) -> bytes:
        """Return the line of the output, in OpenAI's Batch format."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        written = {
            "id": f"batch_req_{self.line}",
            "custom_id": self.custom_id,
            "response": response if self.status is not None else None,
            "error": self.error,
        }
        return json.dumps(written).encode() + b"\n"
