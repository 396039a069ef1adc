"""Which routes of the engine are passed on: what clients ask of a model. Pure.

Routes that change an engine (`/sleep`, `/v1/load_lora_adapter`, `/reset_prefix_cache` …) are not passed on. Routes for
the state of one replica alone (`GET /v1/responses/ID`) are not, either. A path must be written exactly as here: it is
compared as it came, and the engine gets the path that stands here.
"""

from __future__ import annotations

POST_ROUTES = frozenset(
    (
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/chat/completions/derender", "/v1/completions", "/v1/completions/render", "/v1/completions/derender"),
        *("/v1/responses", "/v1/responses/render", "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"),
        *("/v1/embeddings", "/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify"),
        *("/generative_scoring", "/cohere/v2/chat", "/tokenize", "/detokenize", "/inference/v1/generate"),
    )
)
"""Of vLLM 0.32. A websocket (`/v1/realtime`) is none of them."""

GET_ROUTES = frozenset(("/version", "/tokenizer_info"))


def route_of(method: str, raw_path: bytes) -> str | None:
    """Return the route that is passed on; None for any other request.

    >>> route_of("POST", b"/v1/completions")
    '/v1/completions'
    >>> route_of("POST", b"/v1/%63ompletions"), route_of("POST", b"//v1/completions"), route_of("POST", b"/sleep")
    (None, None, None)
    """
    path = raw_path.decode("latin-1")
    if path in POST_ROUTES and method == "POST":
        return path
    return path if path in GET_ROUTES and method in ("GET", "HEAD") else None
