"""Which host this is: what tells two hosts apart that have the same address. Standard library alone.

Every host has 127.0.0.1, and many have the same address on a bridge for containers. What follows from the answer is
decided by the gate and its clients.
"""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"


def host_id() -> str | None:
    """The id of this boot of the host, and of the network namespace: the containers of a host share the boot id.

    Returns None where the kernel does not say.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:
        return None
