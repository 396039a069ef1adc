"""Which requests vLLM 0.32 refuses, and with which error: the stub engine asks here.

Tables of fields and ranges stand for vLLM's own models of requests, of an engine with a parser of tool calls.
`tests/e2e/test_stub_engine.py` sends one list of requests to both and compares the answers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PAUSES = "/pause", "/resume"
WEIGHT_INFO, WEIGHT_VERSION = "/weight_info", "/update_weight_version"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
METHODS: Mapping[str, str] = {
    **dict.fromkeys((COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/embeddings"), "POST"),
    **dict.fromkeys(("/health", "/metrics", "/version", "/v1/models"), "GET"),
}
MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS = 16_384, 20, 4
SEEDS = range(-(1 << 63), 1 << 63)


class Refusal(Exception):
    """An answer of vLLM's that is an error: its status, and what its body says."""

    def __init__(
        self, text: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(text)
        self.status = status
        self.content: dict[str, Any] = {"error": {"message": text, "type": kind, "param": param, "code": status}}


def no_route(status: int, text: str) -> Refusal:
    """Return the refusal of a route or a method, which has a form of its own."""
    refusal = Refusal(text, status=status)
    refusal.content = {"detail": text}
    return refusal


def invalid(field: str, text: str) -> Refusal:
    """Return the refusal of a field that has not the form it must have; "" is the body."""
    return Refusal(f"1 validation error:\n  {field}: {text}", f"body.{field}" if field else "body", kind="Bad Request")


def check_route(method: str, path: str, *, has_adapters: bool = False) -> None:
    """Raise Refusal for a path that is no route, or a method that the route does not have."""
    methods = {**METHODS, **dict.fromkeys((LOAD_ADAPTER, UNLOAD_ADAPTER) if has_adapters else (), "POST")}
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        methods |= {**dict.fromkeys((*PAUSES, WEIGHT_VERSION), "POST"), WEIGHT_INFO: "GET"}
    if path not in methods:
        raise no_route(404, "Not Found")
    if method != methods[path]:
        raise no_route(405, "Method Not Allowed")


def read_body(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. Raise Refusal."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(text, kind="Bad Request")
    if not body:
        raise invalid("", "Field required")
    value = _read_json(body)
    if not isinstance(value, dict):
        raise invalid("", "Input should be a valid dictionary")
    return value


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid(str(error.pos), "JSON decode error") from None
    except UnicodeDecodeError:
        raise invalid("0", "JSON decode error") from None
    except RecursionError:
        raise no_route(400, "There was an error parsing the body") from None


def check_request(path: str, asked: dict[str, Any], *, names: list[str], most_tokens: int) -> None:
    """Raise Refusal for a request that vLLM refuses; makes numbers and switches of words that stand for them.

    `names` are those of the model.
    """
    _check_fields(path, asked)
    if path == CHAT:
        _check_chat(asked)
    elif path == COMPLETIONS:
        _check_completion(asked)
    if asked.get("model") and asked["model"] not in names:
        text = f"The model `{asked['model']}` does not exist. Valid aliases: {', '.join(names)}."
        raise Refusal(text, "model", status=404, kind="NotFoundError")
    asked["model"] = asked.get("model") or names[0]
    if path in (CHAT, COMPLETIONS):
        _check_sampling(path, asked, most_tokens)


def read_weight_version(content_type: str, body: bytes) -> str:
    """Return the name that a request gives the weights. Raise Refusal. A body of another kind has no such field."""
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and kind.endswith(("/json", "+json"))
    asked = _read_json(body) if is_json and body else None
    version = asked.get("new_version") if isinstance(asked, dict) else None
    if not isinstance(version, str):
        raise invalid("new_version", "Input should be a valid string")
    return version


def change_adapters(
    adapters: dict[str, str], path: str, asked: Mapping[str, Any], *, names: list[str], rank: int
) -> str:
    """Load or unload an adapter, as vLLM does; returns what it says. Raise Refusal."""
    name, folder = asked.get("lora_name"), asked.get("lora_path")
    if path == UNLOAD_ADAPTER:
        if name not in adapters:
            raise Refusal(f"The lora adapter '{name}' cannot be found.", status=404, kind="NotFoundError")
        del adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."
    if not name or not folder:
        raise Refusal("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
    if name in names:
        raise Refusal(f"The lora adapter '{name}' conflicts with a served base model.", kind="InvalidUserInput")
    if name in adapters and not asked.get("load_inplace"):
        raise Refusal(f"The lora adapter '{name}' has already been loaded.", kind="InvalidUserInput")
    try:
        with open(f"{folder}/adapter_config.json") as file:
            config = json.load(file)
    except OSError:
        raise Refusal(f"No adapter found for {folder}", status=404, kind="NotFoundError") from None
    if config["r"] > rank:
        text = f"LoRA rank {config['r']} is greater than max_lora_rank {rank}."
        raise Refusal(text, status=500, kind="InternalServerError")
    adapters[name] = folder
    return f"Success: LoRA adapter '{name}' added successfully."


def check_length(tokens: int, most_tokens: int) -> None:
    """Raise Refusal for a prompt that leaves no room for a token."""
    if tokens > most_tokens:
        text = f"This model's maximum context length is {most_tokens} tokens. However, your prompt contains {tokens}"
        raise Refusal(f"{text} input tokens, which exceeds this limit even without any output tokens.", "input_tokens")


def _check_fields(path: str, asked: dict[str, Any]) -> None:
    """Raise Refusal for a field of another type, or one that is missing."""
    for field in _REQUIRED.get(path, ()):
        if field not in asked and not (path == "/tokenize" and "messages" in asked):
            raise invalid(field, "Field required")
    for field, read in _FIELDS.items():
        is_null = asked.get(field) is None and not (path == COMPLETIONS and field == "n" and field in asked)
        if is_null or (path == COMPLETIONS and field in _OF_CHAT) or (path != COMPLETIONS and field in _OF_COMPLETIONS):
            continue
        of_chat = path == CHAT and field == "logprobs"
        try:
            asked[field] = (_switch if of_chat else read)(asked[field])
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
            raise invalid(field, f"Input is not valid: {asked[field]!r}") from None


def _whole(value: Any) -> int:
    if not isinstance(value, int | float | str) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, bool | int | str) or str(value).lower() not in words:
        raise TypeError
    return words[str(value).lower()]


def _seed(value: Any) -> int:
    if _whole(value) not in SEEDS:
        raise ValueError
    return _whole(value)


def _of(*kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return read


def _stops(value: Any) -> Any:
    if not isinstance(value, str) and (
        not isinstance(value, list) or len(value) > MOST_STOPS or not all(isinstance(stop, str) for stop in value)
    ):
        raise TypeError
    return value


def _prompt(value: Any) -> Any:
    """Return a text, ids of tokens, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return value
    lists = value if isinstance(value, list) and all(isinstance(one, list) for one in value) else [value]
    if any(_whole(one) < 0 for ids in lists for one in _of(list)(ids)):
        raise ValueError
    return value


def _messages(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, str):
            raise TypeError
        raise Refusal(f"'{type(value).__name__}' object is not iterable")
    for message in value:
        content, role = message.get("content", ""), message["role"]
        if not isinstance(role, str) or (content is None and role != "assistant"):
            raise TypeError
        if not isinstance(content, str | list | None):
            raise TypeError
        for part in content if isinstance(content, list) else ():
            if "text" not in part and part["type"] == "text":
                raise Refusal("a part of the message has no text")
    return value


def _format(value: Any) -> Any:
    if value["type"] not in ("text", "json_object", "json_schema", "structural_tag"):
        raise ValueError
    return value


def _ids(value: Any) -> list[int]:
    return [_whole(one) for one in _of(list)(value)]


def _tokens(value: Any) -> list[int]:
    if any(one < 0 for one in _ids(value)):
        raise ValueError
    return _ids(value)


def _tools(value: Any) -> Any:
    for tool in _of(list)(value):
        tool["function"]["name"]
    return value


_REQUIRED: Mapping[str, tuple[str, ...]] = {
    CHAT: ("messages",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
    "/v1/embeddings": ("input",),
}
_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "model": _of(str),
    "messages": _messages,
    "tokens": _tokens,
    "prompt": _prompt,
    "stream": _switch,
    "stream_options": _of(dict),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "n"), _whole),
    **dict.fromkeys(("top_k", "top_logprobs", "prompt_logprobs", "logprobs"), _whole),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "echo", "add_generation_prompt"), _switch),
    "continue_final_message": _switch,
    "seed": _seed,
    "stop": _stops,
    "stop_token_ids": _ids,
    "user": _of(str),
    "response_format": _format,
    "tools": _tools,
}
_OF_CHAT = frozenset({"messages", "tools", "max_completion_tokens", "top_logprobs", "add_generation_prompt"})
_OF_COMPLETIONS = frozenset({"echo"})
_LIMITS: Mapping[str, tuple[Callable[[Any], bool], bool]] = {
    "n": (lambda value: 1 <= value <= MOST_CHOICES, False),
    "temperature": (lambda value: 0 <= value <= 2, True),
    "top_p": (lambda value: 0 < value <= 1, True),
    "top_k": (lambda value: value >= -1, False),
    "min_p": (lambda value: 0 <= value <= 1, False),
    "presence_penalty": (lambda value: abs(value) <= 2, False),
    "frequency_penalty": (lambda value: abs(value) <= 2, False),
    "repetition_penalty": (lambda value: 0 < value < math.inf, False),
    "stop": (lambda value: "" not in ([value] if isinstance(value, str) else value), False),
    "logit_bias": (lambda value: all(token.isdecimal() for token in value), True),
    "prompt_logprobs": (lambda value: value >= -1, True),
}
"""Of each field, whether a value is allowed, and whether the error names the field."""


def _check_chat(asked: Mapping[str, Any]) -> None:
    tools, choice = asked.get("tools"), asked.get("tool_choice")
    if tools == []:
        raise Refusal("`tools` must not be an empty array.", "tools")
    if choice is not None and not tools:
        raise Refusal("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise Refusal(f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
    if isinstance(choice, dict) and choice["function"]["name"] not in [tool["function"]["name"] for tool in tools]:
        raise Refusal("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    if asked.get("top_logprobs") is not None and not asked.get("logprobs"):
        raise Refusal("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if not asked["messages"]:
        raise Refusal("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if asked.get("continue_final_message") and asked.get("add_generation_prompt", True):
        raise Refusal("continue_final_message and add_generation_prompt are not compatible.")
    if asked.get("chat_template"):
        raise Refusal("Chat template is passed with request, but --trust-request-chat-template is not set.")
    if any(part["type"] != "text" for message in asked["messages"] for part in _parts(message)):
        raise Refusal("the model is not a multimodal model")


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _check_completion(asked: Mapping[str, Any]) -> None:
    if asked.get("prompt_embeds"):
        raise Refusal("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds")
    prompt = asked.get("prompt")
    if prompt is None or prompt == "":
        raise Refusal("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if asked.get("suffix"):
        raise Refusal("suffix is only supported for models with FIM completion rendering", "suffix")
    if prompt == []:
        raise Refusal("You must pass at least one prompt")
    if isinstance(prompt, list) and any(one in ("", []) for one in prompt):
        raise Refusal("The decoder prompt cannot be empty")


def _check_sampling(path: str, asked: dict[str, Any], most_tokens: int) -> None:
    if path == COMPLETIONS:
        asked.pop("max_completion_tokens", None)
    if asked.get("stream_options") is not None and not asked.get("stream"):
        raise Refusal("Stream options can only be defined when `stream=True`.", "stream_options")
    if asked.get("prompt_logprobs") and asked.get("stream"):
        raise Refusal("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    for field, (is_allowed, is_named) in _LIMITS.items():
        if asked.get(field) is not None and not is_allowed(asked[field]):
            raise Refusal(f"{field} is not allowed: {asked[field]!r}", field if is_named else None)
    named = "max_completion_tokens" if asked.get("max_completion_tokens") is not None else "max_tokens"
    most = asked.get(named)
    if most is not None and most < 1 and not (asked.get("echo") and most == 0):
        raise Refusal(f"max_tokens must be at least 1, got {most}.", "max_tokens")
    if most is not None and most > most_tokens:
        raise Refusal(f"{named}={most} cannot be greater than max_model_len={most_tokens}.", named)
    least = asked.get("min_tokens") or 0
    if not 0 <= least <= (most or most_tokens):
        raise Refusal(f"min_tokens must be between 0 and max_tokens={most}, got {least}.")
    logprobs = asked.get("top_logprobs" if path == CHAT else "logprobs")
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
        raise Refusal(f"Requested sample logprobs of {logprobs}, which is greater than max allowed", "logprobs")
