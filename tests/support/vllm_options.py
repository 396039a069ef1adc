"""Write the options of `vllm serve` into hpc_serve/vllm/data/options.json, from vLLM's own parser.

    python -m tests.support.vllm_options            the pinned version's, of the installed vLLM
    python -m tests.support.vllm_options FOLDER     those of a newer vLLM: what differs from the pinned version

FOLDER holds `vllm/`: an unpacked wheel or source distribution. It is read, not installed. Its parser needs the packages
that vLLM imports; those of the pinned version may be enough. Decide for each new option that the program prints: its
class in classes.json, and its line in uncounted.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.arguments import given_words

_FILE = Path(__file__).parents[2] / "hpc_serve/vllm/data/options.json"

_KINDS: dict[str, str] = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size or auto",
    "loads": "json",
    "parse_dataclass": "json with sizes",
    "union_dict_and_str": "json or text",
    "parse_reasoning_parser": "text",
}
_VALUES = {None: "1", 0: "0", "?": "?", "+": "+"}
# vLLM offers the device it runs on beside these; the file is made and read on machines without one too.
_ADDED_CHOICES = {"--mm-processor-device": ["cuda", "tpu", "xpu"]}


def main() -> None:
    words = given_words(__doc__, 0, 1)
    if words:
        folder = Path(words[0]).resolve()
        if not (folder / "vllm").is_dir():
            sys.exit(f"{folder} has no folder vllm: name the folder of an unpacked vLLM, or none")
        sys.path.insert(0, str(folder))
    options = read_options()
    data = json.loads(_FILE.read_text())
    if words:
        data = with_later(data, version_of_imported(), options)
    else:
        data |= {"version": installed_version(), "options": options}
    _FILE.write_text(as_text(data))
    known = json.loads(_FILE.with_name("classes.json").read_text())
    named = {name for group in known.values() if isinstance(group, (dict, list)) for name in group}
    new = [option["names"][0] for option in options if option["names"][0] not in named]
    print("without a class:", " ".join(new) or "none")


def with_later(data: dict[str, Any], version: str, options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data with a later version, as what differs from the pinned one."""
    pinned = {option["names"][0]: option for option in data["options"]}
    found = {option["names"][0]: option for option in options}
    later = {
        "version": version,
        "gone": [name for name in pinned if name not in found],
        "options": [changed(pinned.get(name, {}), one) for name, one in found.items() if pinned.get(name) != one],
    }
    others = [one for one in data.get("later", []) if one["version"] != version]
    return data | {"later": sorted([*others, later], key=lambda one: [int(n) for n in one["version"].split(".")])}


def changed(pinned: dict[str, Any], option: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an option that differ from the pinned version's, and its names; a field that is gone is
    null."""
    if not pinned:
        return option
    differing = {key: option.get(key) for key in {**pinned, **option} if pinned.get(key) != option.get(key)}
    return {"names": option["names"], **differing}


def as_text(data: dict[str, Any]) -> str:
    """One option a line."""
    later = ",\n".join(
        f'  {{\n   "version": "{one["version"]}",\n   "gone": {json.dumps(one["gone"])},\n'
        f'   "options": [\n{_lines(one["options"], 4)}\n   ]\n  }}'
        for one in data.get("later", [])
    )
    return (
        f'{{\n "made_by": "python -m tests.support.vllm_options",\n "version": "{data["version"]}",\n'
        f' "options": [\n{_lines(data["options"], 2)}\n ],\n "later": [\n{later}\n ]\n}}\n'
    )


def _lines(options: list[dict[str, Any]], indent: int) -> str:
    return ",\n".join(" " * indent + json.dumps(option) for option in options)


def version_of_imported() -> str:
    """The version that the imported vLLM states of itself."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def installed_version() -> str:
    """Without what a build adds after "+" (cpu, cu129)."""
    return importlib.metadata.version("vllm").partition("+")[0]


def read_options() -> list[dict[str, Any]]:
    """One entry an option, in the parser's order."""
    # 0.33 moved the parser.
    place = "common" if importlib.util.find_spec("vllm.entrypoints.common.cli_args") else "launchers"
    make_arg_parser = importlib.import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    assert parser.allow_abbrev, "vLLM's parser used to complete abbreviations, which arguments.py refuses for it"
    # An action shows the spellings of its help. Those that the parser takes may be more.
    spellings: dict[int, list[str]] = {}
    for name, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(name)
    return [_entry(action, spellings[id(action)]) for action in parser._actions if action.option_strings]


def _entry(action: argparse.Action, spellings: list[str]) -> dict[str, Any]:
    inverse = getattr(action, "negative_option_strings", ())
    negated = [
        name
        for name in spellings
        if isinstance(action, argparse.BooleanOptionalAction) and (name.startswith("--no-") or name in inverse)
    ]
    names = [name for name in spellings if name not in negated]
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
