"""Jinja templates of shell scripts, ours and a site's. Every value that is printed is quoted for the shell. Pure.

A site's template that everybody can change is refused. render.py and the other users of a template decide the content
of a script.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.ownership import check_chosen

# With autoescape on, Jinja marks the output of blocks and macros as Markup. Here this mark means "checked" or "quoted".
Checked = Markup


def render_template(name: str, site_templates: str | None, context: Mapping[str, Any]) -> str:
    """Return the text of a template, of the site's folder if it has one of that name, else ours.

    Raises InvalidRequestError if it uses a value that is not there or is no template, or if everybody can change it.
    """
    try:
        return _environment(site_templates).get_template(name).render(context)
    except (jinja2.TemplateError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"template {name} cannot be rendered: {error}") from error


def comment(text: str) -> Markup:
    """`text` as it may stand behind a `#`: on one line, without control characters."""
    return Checked("".join(character if character.isprintable() else "?" for character in text))


class _SiteLoader(jinja2.FileSystemLoader):
    """Opens a site's templates, those too that others include, extend or import."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        source, path, is_unchanged = super().get_source(environment, template)
        check_chosen(Path(path), called=f"the template {path}")
        return source, path, is_unchanged


def _environment(site_templates: str | None) -> jinja2.Environment:
    ours = jinja2.PackageLoader("hpc_serve.templates", "")
    folders = [_SiteLoader(site_templates)] if site_templates else []
    ours_by_name = jinja2.PrefixLoader({"hpc-serve": ours})  # for a template of the site that has the name of ours
    environment = SandboxedEnvironment(
        loader=jinja2.ChoiceLoader([*folders, ours, ours_by_name]),
        undefined=jinja2.StrictUndefined,
        finalize=_shell_word,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    environment.filters["both_sides"] = lambda bind: bind if ":" in bind else f"{bind}:{bind}"
    environment.filters["on_one_line"] = lambda text: Markup(
        " ".join(line.strip() for line in text.split("\n") if line.strip())
    )
    environment.filters["words"] = lambda words: Markup(" ".join(_quote(str(word)) for word in words))
    return environment


def _shell_word(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(_quote(str(value)))


def _quote(word: str) -> str:
    """`word` quoted for bash, on one line, so that a template may indent what holds it."""
    if "\n" not in word:
        return shlex.quote(word)
    return "$'" + word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
