"""The name of the user that a process runs as."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """Return the user's name, as Slurm knows it; the number in a container without the site's user database."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
