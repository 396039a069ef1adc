"""Reads the stream of one answer: when its pieces came, its text, and how many tokens the engine has counted.

Pure; whoever reads the connection says when bytes came. A piece counts as `vllm bench serve` counts it: each event with
a choice, also one without text, since a token may have none.
"""

from __future__ import annotations

import json
from typing import Any

from hpc_serve.client.resume.received import DONE, EVENT_END, datas


class AnswerReader:
    """One answer of a stream of completions or chat. Times are those of the caller's clock, in seconds."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._last_s = start_s
        self._rest = b""
        self._texts: list[str] = []
        self.ttft_s: float | None = None
        self.itls_s: list[float] = []
        self.input_len: int | None = None
        self.output_len: int | None = None
        self.error = ""
        self.is_done = False

    @property
    def latency_s(self) -> float:
        """Return the seconds from the start to the last piece."""
        return self._last_s - self._start_s

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, data: bytes, now_s: float) -> None:
        """More bytes of the body have come."""
        whole, end, self._rest = (self._rest + data).rpartition(EVENT_END)
        for event in datas(whole + end):
            self._read(event, now_s)

    def failure(self) -> str:
        """Why this is no whole answer; "" if it is one."""
        if self.error:
            return self.error
        if self.ttft_s is None:
            return "the answer has no token"
        return "" if self.is_done else "the answer ended before its end"

    def _read(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = self.error or f"the engine sent what is no JSON: {data[:100]!r}"
            return
        if not isinstance(event, dict):
            self.error = self.error or f"the engine sent no object: {data[:100]!r}"
        elif "error" in event:
            self.error = self.error or error_text(event)
        else:
            self._note(event, now_s)

    def _note(self, event: dict[str, Any], now_s: float) -> None:
        if choices := event.get("choices"):
            if self.ttft_s is None:
                self.ttft_s = now_s - self._start_s
            else:
                self.itls_s.append(now_s - self._last_s)
            self._last_s = now_s
            choice = choices[0]
            delta = choice.get("delta") or {}
            self._texts.append(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
            if choice.get("finish_reason") in ("abort", "error"):
                self.error = self.error or f"the engine ended the answer: {choice['finish_reason']}"
        if usage := event.get("usage"):
            self.input_len = usage.get("prompt_tokens", self.input_len)
            self.output_len = usage.get("completion_tokens", self.output_len)


def error_text(answer: Any) -> str:
    """Return the message of an OpenAI error object, in one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return one_line(error.get("message", error) if isinstance(error, dict) else error)


def one_line(text: object) -> str:
    """Return the beginning of a text as one line."""
    return " ".join(str(text).split())[:300]
