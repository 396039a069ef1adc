"""The name of the model in the body of a request, and the same body with another name. Pure.

A JSON body has the field `model`, and a form (audio) has a part of that name. The engine checks all other fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.client.connections.message import Message

_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_IS_MODEL = re.compile(
    rb'^content-disposition:[^\r\n]*;[ \t]*name="?model"?[ \t]*(;|\r|$)', re.IGNORECASE | re.MULTILINE
)
_LONGEST_NAME = 1_000
_DECODER = json.JSONDecoder()  # json.loads first finds out in which encoding bytes are


def read_body(content_type: str, body: bytes) -> tuple[Mapping[str, Any], str | None]:
    """Return the fields of a JSON body, and the model that a request is for; None if it names none.

    Another body has no fields. The engine has to say what is wrong with a body.
    """
    if _is_form(content_type):
        found = _model_part(content_type, body)
        return {}, found[1].decode(errors="replace") if found is not None else None
    try:
        fields = _DECODER.raw_decode(body.decode().lstrip())[0]
    except (ValueError, RecursionError):
        return {}, None
    if not isinstance(fields, dict):
        return {}, None
    model = fields.get("model")
    return fields, model if isinstance(model, str) and model else None


def with_model(message: Message, model: str) -> Message:
    """Return the same request, for another name of the model."""
    content_type, body = dict(message.headers).get(b"content-type", b"").decode("latin-1"), message.content or b""
    if _is_form(content_type):
        found = _model_part(content_type, body)
        if found is not None:
            body = body[: found[0]] + model.encode() + body[found[0] + len(found[1]) :]
        return replace(message, content=body)
    fields = {**(message.fields or {}), "model": model}
    return replace(message, content=json.dumps(fields, separators=(",", ":")).encode(), fields=fields)


def _is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def _model_part(content_type: str, body: bytes) -> tuple[int, bytes] | None:
    """Return the offset and the value of the form's field `model`."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        return None
    mark = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    begin = body.find(mark)
    while begin != -1:
        end = body.find(b"\r\n" + mark, begin + len(mark))
        head_end = body.find(b"\r\n\r\n", begin, end if end != -1 else None)
        if end == -1 or head_end == -1:
            return None
        if _IS_MODEL.search(body[begin + len(mark) + 2 : head_end]):
            value = body[head_end + 4 : end]
            return (head_end + 4, value) if 0 < len(value) <= _LONGEST_NAME else None
        begin = end + 2
    return None
