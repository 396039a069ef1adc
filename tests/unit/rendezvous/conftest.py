"""A store of its own for each test, and access control lists."""

import os
import struct

import pytest

from hpc_serve.rendezvous.store import ServiceStore


@pytest.fixture
def store(tmp_path):
    return ServiceStore(tmp_path / "home")


def set_acl(path, name, *entries):
    """Give a path an ACL as `setfacl` does: entries of tag, rights and number, in the kernel's order."""
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{name}", content)
    except OSError as error:
        pytest.skip(f"the file system of {path} takes no ACL: {error}")
