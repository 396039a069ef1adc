"""Which fields of a config may be passed over, and which nobody has read although they look like a size.

A field counts as read where a family asks for it while the model is built. The others are passed over if they are
known to change no size. catalog/config_keys.json has those that transformers knows (the tests' support/config_keys.py
measures them). catalog/config_fields.json has what configs hold beyond transformers' own classes, and
catalog/architectures.json the same for one architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import architectures, config_fields, config_keys
from hpc_serve.plan.model.config_check import CheckedConfig

ALLOW_UNKNOWN_KEYS = "--allow-unknown-config-keys"

_ENDINGS = re.compile(
    r"(?:^mtp_.*|_token_ids?|_token_index|_tok_index|_token|_dropout(?:_prob|_rate|_p)?|_pdrop|^dropout|_eps|_epsilon"
    r"|initializer_range|_init_std|^init_std|_coeff?|_loss_weight|_softcap(?:ping)?|^_.*)$"
)
"""Endings of names: tokens, dropout, small numbers in norms, weights' first values, and names that begin with "_"."""

_EVERYWHERE_ALIKE = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
"""Kinds of layers whose difference a family reads elsewhere."""

_TELLING_TRUE = re.compile(
    r"(?:^|_)(?:bias|norm|tie|tied|shared?|experts?|moe|lora|latent|mla|sinks?|multi_query)(?:_|$)"
)
_TELLING_NUMBER = re.compile(r"(?:^|_)(?:mult|multiplier|ratio|expan\w*|width|dim|size)(?:_|$)")
_TELLING_TEXT = re.compile(r"(?:^|_)pattern(?:_|$)")


def check_all_read(config: CheckedConfig, architecture: str, *, name: str, allow: bool) -> tuple[str, ...]:
    """Return the fields of a config that look like a size and were not read, each with its value.

    Raises InvalidRequestError where there are some, unless `allow`.
    """
    unknown = tuple(f"{path} ({_short(value)})" for path, value in _unread(config, config, architecture))
    if unknown and not allow:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise InvalidRequestError(
            f"The config of {name} has {', '.join(unknown[:3])}{more}, which this planner does not know for "
            f"{architecture}: the model may be of another size than it would say. {ALLOW_UNKNOWN_KEYS} plans "
            "without it, at your own risk."
        )
    return unknown


def _unread(config: CheckedConfig, inner: CheckedConfig, architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field that was not read, is not known to be without a size, and looks like
    one."""
    text = config.peek("text_config")
    built_with = architectures()[architecture].get("built_with", {})
    for name, value in inner.items():
        path = inner.path + name
        is_read = path in config.read
        if name in ("rope_scaling", "rope_parameters"):
            continue  # they say how positions are turned, and architectures.py reads what of them makes contexts longer
        if is_read and isinstance(value, CheckedConfig):
            yield from _unread(config, value, architecture)
        elif is_read and isinstance(value, list) and value and isinstance(value[0], CheckedConfig):
            for one in value:
                yield from _unread(config, one, architecture)
        elif name in built_with:
            if value != built_with[name]:
                yield path, value
        elif is_read or _is_passed_over(path, name, value, architecture) or not looks_like_size(name, value):
            continue
        elif inner is config and isinstance(text, CheckedConfig) and text.peek(name) == value:
            continue  # what the decoder's own config says too
        else:
            yield path, value


def _is_passed_over(path: str, name: str, value: Any, architecture: str) -> bool:
    measured, fields = config_keys(), config_fields()
    if path in architectures()[architecture].get("passed_over", ()):
        return True
    if "quantization_config." in path or "compression_config." in path:
        return name in fields["passed_over_of_quantization"] or name in fields["passed_over"]
    if name in fields["passed_over"] or name in measured["generic"] or _ENDINGS.search(name):
        return True
    unchanged = measured["no_weight_changes"].get(architecture, ())
    if path in unchanged or f"text_config.{path}" in unchanged:
        return True
    if name == "attn_type_list":
        return all(kind == 1 for kind in value)
    return name == "layer_types" and all(kind in _EVERYWHERE_ALIKE for kind in value)


def looks_like_size(name: str, value: Any, *, depth: int = 0) -> bool:
    """Return whether a field may change a model's size: whole numbers but 0, lists, objects with such, and some by
    their name.

    >>> looks_like_size("moe_latent_size", 1024), looks_like_size("hidden_act", "silu")
    (True, False)
    """
    if isinstance(value, bool):
        return value and _TELLING_TRUE.search(name) is not None
    if isinstance(value, int):
        return value != 0
    if isinstance(value, float):
        return (value > 1 and value.is_integer()) or (value != 0 and _TELLING_NUMBER.search(name) is not None)
    if isinstance(value, str):
        return _TELLING_TEXT.search(name) is not None
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    if isinstance(value, Mapping):
        return depth > 8 or any(looks_like_size(str(key), one, depth=depth + 1) for key, one in value.items())
    return False


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 30 else f"{text[:27]}..."
