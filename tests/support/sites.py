"""Site files for tests."""

from __future__ import annotations

from pathlib import Path

from hpc_serve.submit.site.site import SiteProfile
from hpc_serve.submit.site.site_files import read_site


def load_site(path: Path) -> SiteProfile:
    """Read one site file alone."""
    return read_site({"HPC_SERVE_SYSTEM_SITE": ""}, str(path))
