"""The table of the site file's settings in docs/guides/site.md: `python -m tests.support.site_table` makes it from the source."""

from __future__ import annotations

from dataclasses import fields

from hpc_serve.submit.site.site import SiteProfile


def site_table() -> str:
    """Every setting of a site file and what it says, as Markdown."""
    rows = [f"| `{setting.name}` | {_help(setting.metadata)} |" for setting in fields(SiteProfile)]
    return "\n".join(["| setting | what it says |", "|---|---|", *rows])


def _help(metadata) -> str:
    text = metadata.get("site_help") or metadata["help"]
    return text.rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    print(site_table())
