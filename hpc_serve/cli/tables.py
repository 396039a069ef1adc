"""The lists of what the catalogue knows, as tables: models and accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hpc_serve.cli.console import PlainConsole, plain_table
from hpc_serve.sizes import GIB

if TYPE_CHECKING:
    from hpc_serve.plan.catalog import CatalogModel
    from hpc_serve.submit.site.site_models import SiteModel

_WIDE_ENOUGH = 60  # columns for a list of models with their sizes


def print_models(
    own: Sequence[SiteModel], entries: Sequence[CatalogModel], layouts: Mapping[str, str | None] = MappingProxyType({})
) -> None:
    """The site's own models, then the catalogue: short name, repository, size; those with a short name first.

    `layouts` adds a column, by repository.
    """
    console = PlainConsole()
    shows_size = console.width >= _WIDE_ENOUGH
    further = [*(["PARAMETERS"] if shows_size else []), *(["LAYOUT"] if layouts else [])]
    table = plain_table("NAME", "MODEL", *further, right=("PARAMETERS",), folded=("MODEL",))
    for model in own:
        note = f"{model.model} ({model.note})" if model.note else model.model
        has = [Text(layouts[model.model] or "")] if layouts else []
        table.add_row(Text(f"{model.name} (site)"), Text(note), *([Text("")] if shows_size else []), *has)
    short = {entry.name: " ".join(alias for alias in entry.aliases if "/" not in alias) for entry in entries}
    for entry in sorted(entries, key=lambda entry: not short[entry.name]):
        size = f"{entry.published_parameters / 1e9:,.1f} B" if entry.published_parameters else ""
        has = [Text(layouts[entry.name] or "")] if layouts else []
        table.add_row(Text(short[entry.name]), Text(entry.name), *([Text(size)] if shows_size else []), *has)
    console.print(table)


def print_accelerators(entries: Sequence[Mapping[str, Any]]) -> None:
    """Accelerators as `gpus` describes them: the name to type, memory, how many a node has, what the engine runs on."""
    console = PlainConsole()
    is_wide = console.width >= _WIDE_ENOUGH
    headings = ("NAME", "MEMORY", "PER NODE", "ENGINE", *(("IS",) if is_wide else ()))
    table = plain_table(*headings, right=("MEMORY", "PER NODE"), folded=("IS",))
    for entry in entries:
        memory = f"{entry['memory_bytes'] / GIB:.1f} GiB" if entry["memory_bytes"] else "--gpu-memory"
        aliases = f" ({', '.join(entry['aliases'])})" if entry["aliases"] else ""
        product = f"{entry['product']}{aliases}{'; plan alone' if entry['no_script_reason'] else ''}"
        name = Text(f"{'* ' if entry['is_own'] else '  '}{entry['name']}")
        cells = [name, Text(memory), Text(str(entry["per_node"])), Text(entry["engine"])]
        table.add_row(*cells, *([Text(product)] if is_wide else []))
    console.print(table)
