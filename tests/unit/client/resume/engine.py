"""A likeness of how vLLM streams tokens, for tests of what becomes of a broken stream. Pure.

A token is a byte, so half a character is a token without text. What comes next follows from the tokens before it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

FIRST = 10  # the token of the byte 0
END = 1
PROMPT = [7, 8, 9]
CONTEXT = 512


class Engine:
    """Answers the two routes for one conversation whose whole answer is `text`; `several` tokens come in one event."""

    def __init__(self, text: str, *, name: str = "a", several: int = 1, context: int = CONTEXT) -> None:
        self.text, self.name, self.several, self.context = text, name, several, context
        self.prompt = PROMPT

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "m", "max_model_len": self.context}]}

    def detokenize(self, content: bytes) -> dict[str, Any]:
        """As vLLM: half a character is U+FFFD; a token of the prompt is one letter here."""
        ids = json.loads(content)["tokens"]
        letters = "".join(chr(token) for token in ids if token in PROMPT)
        return {"prompt": letters + bytes(token - FIRST for token in ids if token >= FIRST).decode(errors="replace")}

    def stream(self, path: str, content: bytes) -> bytes:
        """All events of an answer."""
        return b"".join(f"data: {data}\n\n".encode() for data in self._datas(path, json.loads(content)))

    def _datas(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        is_chat = path.endswith("/chat/completions")
        prompt = self.prompt if is_chat or isinstance(body["prompt"], str) else body["prompt"]
        assert prompt[: len(self.prompt)] == self.prompt
        most = body.get("max_tokens") or (self.context - len(prompt) if is_chat else 16)
        assert len(prompt) + most <= self.context
        head: dict[str, Any] = {
            "id": f"{self.name}-1",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
        }
        head |= {"created": ord(self.name), "model": "m"}
        shows_ids = body.get("return_token_ids")
        if is_chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield json.dumps({**head, "choices": [first], **({"prompt_token_ids": prompt} if shows_ids else {})})
        count = 0
        for ids, text, finish in self._together(self._steps(prompt[len(self.prompt) :], body, most)):
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            if shows_ids:
                choice["token_ids"] = ids
                if not count and not is_chat:
                    choice["prompt_token_ids"] = prompt
            count += len(ids)
            yield json.dumps({**head, "choices": [choice]}, separators=(",", ":"))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            yield json.dumps({**head, "choices": [], "usage": usage})
        yield "[DONE]"

    def _together(self, steps: Iterator[tuple[int, str, str | None]]) -> Iterator[tuple[list[int], str, str | None]]:
        ids: list[int] = []
        text = ""
        for token, piece, finish in steps:
            ids, text = [*ids, token], text + piece
            if finish or len(ids) == self.several:
                yield ids, text, finish
                ids, text = [], ""

    def _steps(self, made: list[int], body: dict[str, Any], most: int) -> Iterator[tuple[int, str, str | None]]:
        """Token, the text that may be shown by now, and how it finished."""
        whole = self.text.encode()
        assert bytes(token - FIRST for token in made) == whole[: len(made)], "these tokens were never made"
        decoder = codecs.getincrementaldecoder("utf-8")()
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        keeps_stop = bool(body.get("include_stop_str_in_output"))
        held = 0 if keeps_stop else max((len(stop) - 1 for stop in stops), default=0)
        text, shown = "", 0
        for count, byte in enumerate([*whole[len(made) :], None], start=1):
            if byte is None:
                yield END, text[shown:], "stop"
                return
            piece = decoder.decode(bytes([byte]))
            text += piece
            ends = [stop for stop in stops if piece and text.endswith(stop)]
            if ends and count > (body.get("min_tokens") or 0):
                yield byte + FIRST, (text if keeps_stop else text[: -len(ends[0])])[shown:], "stop"
                return
            if count == most:
                yield byte + FIRST, text[shown:], "length"
                return
            until = max(shown, len(text) - held)
            yield byte + FIRST, text[shown:until], None
            shown = until
