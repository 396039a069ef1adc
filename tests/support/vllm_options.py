"""Writes which options the installed vLLM's `vllm serve` has, as hpc_serve/vllm/data/options.json holds them.

It asks vLLM's own parser. Run it when the pinned version changes, and then decide for each new option in classes.json:

    python -m tests.support.vllm_options > hpc_serve/vllm/data/options.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

_KINDS: dict[str, str] = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size or auto",
    "loads": "json",
    "parse_dataclass": "json with sizes",
    "union_dict_and_str": "json or text",
}
_VALUES = {None: "1", 0: "0", "?": "?", "+": "+"}
# vLLM offers the device it runs on beside these; the file is made and read on machines without one too.
_ADDED_CHOICES = {"--mm-processor-device": ["cuda", "tpu", "xpu"]}


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        options = read_options()
    lines = ",\n".join(f"  {json.dumps(option)}" for option in options)
    print(
        f'{{\n "made_by": "python -m tests.support.vllm_options",\n "version": "{installed_version()}",\n'
        f' "options": [\n{lines}\n ]\n}}'
    )


def installed_version() -> str:
    """Without what a build adds after "+" (cpu, cu129)."""
    return importlib.metadata.version("vllm").partition("+")[0]


def read_options() -> list[dict[str, Any]]:
    """One entry an option, in the parser's order."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    assert parser.allow_abbrev, "vLLM's parser used to complete abbreviations, which arguments.py refuses for it"
    return [_entry(action) for action in parser._actions if action.option_strings]


def _entry(action: argparse.Action) -> dict[str, Any]:
    negated = [
        name
        for name in action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction) and name.startswith("--no-")
    ]
    names = [name for name in action.option_strings if name not in negated]
    names.sort(key=lambda name: not name.startswith("--"))  # stable: the first long one names the option
    values = _VALUES[action.nargs]
    kind, is_optional = ("switch", False) if values == "0" else _kind(action.type)
    entry: dict[str, Any] = {"names": names, "values": values, "kind": kind}
    if negated:
        entry["negated"] = negated
    if is_optional:
        entry["optional"] = True
    if isinstance(action, argparse._AppendAction):
        entry["repeats"] = True
    if action.choices is not None:
        choices = [choice for choice in action.choices if choice is not None]
        entry["choices"] = sorted({*choices, *_ADDED_CHOICES.get(names[0], ())})
    return entry


def _kind(convert: Any) -> tuple[str, bool]:
    """What a value is, and whether "None" stands for none."""
    if convert is None:
        return "text", False
    wrapped = _closed_over(convert)
    name = getattr(convert, "__name__", "")
    if name == "_optional_type":
        return _kind(wrapped)[0], True
    if name == "_parse_type":
        return _kind(wrapped)
    if name == "<lambda>":
        return ("name" if convert("A-b") == "a_b" else "text"), False
    return _KINDS[name], False


def _closed_over(function: Any) -> Callable[[str], Any] | None:
    cells = getattr(function, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if callable(cell.cell_contents)), None)


if __name__ == "__main__":
    main()
