"""Finds and merges the site files: the system's, then the user's. Each setting of the user's file wins.

site.py decides what one file may say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.errors import SiteFileError
from hpc_serve.rendezvous.ownership import check_chosen, fault
from hpc_serve.submit.site.site import PYTHONS, SiteProfile, read_settings

SYSTEM_FILE = "/etc/hpc-serve/site.yaml"


@dataclass(frozen=True, kw_only=True)
class MergedSite:
    """The merged settings; `files` in the order of reading; `sources` has the file of each setting in force."""

    profile: SiteProfile
    files: tuple[Path, ...]
    sources: Mapping[str, Path]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings in force, by name."""
        return {name: getattr(self.profile, name) for name in self.sources}


def read_site(environ: Mapping[str, str], named: str | None = None) -> SiteProfile:
    """Return the merged settings of the site files. `named` is the user's file (`--site`). Raises SiteFileError."""
    return merge_site(environ, named).profile


def merge_site(environ: Mapping[str, str], named: str | None = None) -> MergedSite:
    """Return the merged settings, with the file of each setting. Raises SiteFileError."""
    files = tuple(dict.fromkeys(one for one in (find_system_file(environ), find_user_file(environ, named)) if one))
    settings: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    for file in files:
        own = read_settings(file)
        if any(own.get(name) for name in PYTHONS):  # one of them replaces the other kinds too
            for name in PYTHONS:
                settings.pop(name, None)
        for name in ("env", "machines"):  # merged by their own names
            if own.get(name):
                own[name] = {**settings.get(name, {}), **own[name]}
        settings |= own
        sources |= dict.fromkeys(own, file)
    in_force = {name: value for name, value in settings.items() if value not in (None, (), {})}
    return MergedSite(profile=SiteProfile(**settings), files=files, sources={name: sources[name] for name in in_force})


def find_system_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file named by HPC_SERVE_SYSTEM_SITE (empty: none), else `/etc/hpc-serve/site.yaml` if there is one.

    Its words decide what runs as the user, who did not name it. Raises SiteFileError if others can change it.
    """
    named = environ.get("HPC_SERVE_SYSTEM_SITE")
    if named == "" or (named is None and not Path(SYSTEM_FILE).exists()):
        return None
    path = Path(named or SYSTEM_FILE)
    if reason := fault(path, "read"):
        raise SiteFileError(
            f"the system's site file {path} is not used: {reason}. Its words decide what runs as you: have it made "
            "root's or yours, and writable to nobody else; or set HPC_SERVE_SYSTEM_SITE= (empty) to go without it."
        )
    return path


def find_user_file(environ: Mapping[str, str], named: str | None = None) -> Path | None:
    """Find the user's file: the named one, or the default one if it exists. Raises SiteFileError if everybody can
    change it."""
    path = user_file(environ, named)
    if not (named or environ.get("HPC_SERVE_SITE") or path.exists()):
        return None
    check_chosen(path, called=f"the site file {path}")
    return path


def user_file(environ: Mapping[str, str], named: str | None = None) -> Path:
    """Return the file named by `--site`, else by HPC_SERVE_SITE, else `~/.config/hpc-serve/site.yaml`."""
    if chosen := named or environ.get("HPC_SERVE_SITE"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hpc-serve" / "site.yaml"
