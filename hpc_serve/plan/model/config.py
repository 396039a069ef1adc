"""A Hugging Face config: its fields are checked before anything is calculated, and no size in it is passed over.

Anybody can write a config. A zero among the sizes, or text in place of a number, is an error that names the field. A
field that is null counts as missing. A field that is not in catalog/config_fields.json stays unchanged.

A config remembers which of its fields were read: those that a family asks for while the model is built. The others are
passed over if they are known to change no size. catalog/config_keys.json has those that transformers knows (the tests'
support/config_keys.py measures them). catalog/config_fields.json has what configs hold beyond transformers' classes,
and catalog/architectures.json the same for one architecture. Any other field that looks like a size is refused.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import architectures, config_fields, config_keys

_LARGEST = 2**40
_MOST_LAYERS = 2_000
"""Ten times as many as any model has. A plan for more would take longer than a second."""
_MOST_FIELDS = 10_000
_DEEPEST = 8
"""Objects within objects. Published configs have four."""

_OBJECTS_OF_OBJECTS = "config_groups."
_Predicate: TypeAlias = Callable[[Any], bool]


class CheckedConfig(dict[str, Any]):
    """A config, or an object in it, with its listed fields checked and its nulls removed.

    `config[name]` raises InvalidRequestError where the field is missing. `read` holds the fields that `config[name]`
    and `get` were asked for, with the names of the objects that they lie in.
    """

    def __init__(self, config: Mapping[str, Any], *, path: str = "", read: set[str] | None = None) -> None:
        super().__init__()
        self.path = path
        self.read: set[str] = set() if read is None else read
        if path.count(".") > _DEEPEST:
            raise InvalidRequestError(f"The config has objects within objects, more than {_DEEPEST} deep: {path[:60]}.")
        if len(config) > _MOST_FIELDS:
            raise InvalidRequestError(f"The config has {len(config):,} fields: at most {_MOST_FIELDS:,} are read.")
        for name, value in config.items():
            if value is not None:
                self[str(name)] = self._checked(str(name), value)

    def __missing__(self, name: str) -> Any:
        raise missing(f"{self.path}{name}")

    def __getitem__(self, name: str) -> Any:
        self.read.add(self.path + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(self.path + name)
        return super().get(name, default)

    def peek(self, name: str) -> Any:
        """Return the field as `get` has it, which does not count as read."""
        return super().get(name)

    def _checked(self, name: str, value: Any) -> Any:
        of_path = "object" if self.path.endswith(_OBJECTS_OF_OBJECTS) else _kinds().get(self.path + name)
        kind = of_path or _kinds().get(name)
        if kind is None:
            return value
        is_right, wanted = _RULES[kind]
        if not is_right(value):
            raise InvalidRequestError(f"The config's {self.path}{name} is {_shown(value)}: it must be {wanted}.")
        if kind == "object":
            return CheckedConfig(value, path=f"{self.path}{name}.", read=self.read)
        if kind == "list_of_objects":
            inside = f"{self.path}{name}"
            return [CheckedConfig(one, path=f"{inside}[{index}].", read=self.read) for index, one in enumerate(value)]
        return value


@lru_cache(maxsize=1)
def _kinds() -> Mapping[str, str]:
    """Return the kind of each field that is checked."""
    return {name: kind for kind, names in config_fields()["checked"].items() for name in names}


def _shown(value: Any) -> str:
    """Return the value in at most 40 characters."""
    text = reprlib.repr(value) if isinstance(value, (list, tuple, Mapping)) or type(value) is int else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def missing(field: str) -> InvalidRequestError:
    """Return the error for a missing field that is needed."""
    return InvalidRequestError(f"The config has no {field!r}, without which the model's size is unknown.")


def _whole(least: int, most: int = _LARGEST) -> _Predicate:
    return lambda value: type(value) is int and least <= value <= most


def _of(*types: type) -> _Predicate:
    return lambda value: isinstance(value, types)


def _list_of(is_right: _Predicate, *, most: int = _MOST_FIELDS) -> _Predicate:
    return lambda value: isinstance(value, (list, tuple)) and len(value) <= most and all(map(is_right, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _LARGEST and math.isfinite(value)


def _is_enumeration(value: Any) -> bool:
    numbers = value.split(",") if isinstance(value, str) else []
    return 0 < len(numbers) <= _MOST_FIELDS and all(one.isdecimal() and len(one) <= 5 for one in numbers)


def _any(*rules: _Predicate) -> _Predicate:
    return lambda value: any(is_right(value) for is_right in rules)


_RULES: dict[str, tuple[_Predicate, str]] = {
    "layers": (_whole(1, _MOST_LAYERS), f"a whole number from 1 to {_MOST_LAYERS:,}"),
    "at_least_one": (_whole(1), "a whole number of at least 1"),
    "at_least_zero": (_whole(0), "a whole number, not negative"),
    "sizes": (_any(_whole(0), _list_of(_whole(0))), "a whole number, not negative, or a list of such"),
    "group_size": (_whole(-1), "a whole number, or -1"),
    "number": (_is_number, "a number above 0"),
    "number_or_zero": (_any(_is_number, lambda value: value == 0), "a number, not negative"),
    "list": (_of(list, tuple), "a list"),
    "pair": (lambda value: _list_of(_whole(1))(value) and len(value) == 2, "two whole numbers of at least 1"),
    "list_of_numbers": (_list_of(_whole(0)), f"a list of whole numbers, at most {_MOST_FIELDS:,}"),
    "list_of_texts": (_list_of(_of(str), most=_LARGEST), "a list of texts"),
    "object": (_of(Mapping), "an object"),
    "list_of_objects": (_list_of(_of(Mapping)), f"a list of objects, at most {_MOST_FIELDS:,}"),
    "pattern": (_any(_whole(1), _of(str)), "a whole number of at least 1, or a text"),
    "every": (_any(_whole(1), _list_of(_whole(0, 1))), "a whole number of at least 1, or a list of 0 and 1"),
    "text": (_of(str), "a text"),
    "flag": (lambda value: value in (False, True), "true or false"),
    "flag_or_text": (_of(bool, str), "true, false or a text"),
    "enumeration": (_is_enumeration, "numbers of layers, with commas between them"),
}
"""The rule of each kind of field in catalog/config_fields.json: what is right, and what must be there."""

_NESTED = ("text_config", "vision_config")
_ROPE = ("rope_scaling", "rope_parameters")
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


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the config as --hf-overrides changes it: `_apply_dict_overrides` in vLLM's config/model.py.

    Fields of the decoder's or of the tower's config are changed one by one, every other field is replaced.

    >>> with_overrides({"text_config": {"a": 1, "b": 2}, "c": 3}, {"text_config": {"a": 4}})
    {'text_config': {'a': 4, 'b': 2}, 'c': 3}
    """
    changed = dict(config)
    for name, value in (overrides or {}).items():
        if name in _ROPE:
            changed = {key: kept for key, kept in changed.items() if key not in _ROPE}
        inner = changed.get(name)
        if name in _NESTED and isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = with_overrides(inner, value)
        changed[name] = value
    return changed


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
        if name in _ROPE:
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
