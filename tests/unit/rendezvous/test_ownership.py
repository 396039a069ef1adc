"""A stranger's folder, file or link is not used, wherever it stands on the way.

As root, files are given away for real.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous import ownership
from hpc_serve.rendezvous.ownership import fault, require
from tests.support.strangers import STRANGER, give_away, needs_root
from tests.unit.rendezvous.conftest import set_acl

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("use", ["own", "private", "read", "scratch"])
def test_a_private_folder_of_ones_own_is_used_for_everything(home, use):
    assert fault(home, use) is None
    assert fault(home / "not" / "there" / "yet", use) is None


@pytest.mark.parametrize(
    ("mode", "use", "says"),
    [
        (0o777, "own", "can be changed by everybody (mode 0777)"),
        (0o777, "scratch", "can be changed by everybody (mode 0777, without the sticky bit)"),
        (0o1777, "own", "can be changed by everybody (mode 1777)"),
        (0o1777, "scratch", None),
        (0o755, "own", None),
        (0o755, "private", "can be read by others (mode 0755)"),
        (0o700, "private", None),
        (0o722, "read", "can be changed by everybody (mode 0722)"),
    ],
)
def test_modes(home, mode, use, says):
    home.chmod(mode)
    found = fault(home, use)
    assert found == (f"{home} {says}" if says else None)


@pytest.mark.parametrize("mode", [0o777, 0o733])
def test_a_folder_above_that_everybody_can_write_to_is_seen(home, mode):
    below = home / "a" / "b"
    below.mkdir(parents=True, mode=0o700)
    home.chmod(mode)
    assert str(home) in (fault(below, "own") or "")
    assert str(home) in (fault(below / "new", "own") or "")
    home.chmod(mode | 0o1000)  # as /tmp: what is ours in it stays ours
    assert fault(below, "own") is None


def test_what_belongs_to_a_stranger_is_not_used_nor_what_is_below(home):
    below = home / "below"
    below.mkdir(mode=0o700)
    give_away(home)
    assert fault(home, "read") == f"{home} belongs to user {STRANGER}, not to you"
    assert fault(below, "own") == f"{home} belongs to user {STRANGER}, who can replace what is below it"


@needs_root
def test_the_group_counts_unless_it_is_the_users_own(home, monkeypatch):
    home.chmod(0o770)
    os.chown(home, 0, STRANGER)
    assert "group" in (fault(home, "own") or "")
    os.chown(home, 0, 0)  # root's own group, which lists nobody
    assert fault(home, "own") is None
    monkeypatch.setattr(ownership, "_is_own_group", lambda number, user: False)
    assert fault(home, "own") == f"{home} can be changed by group root (mode 0770)"


def test_links_of_ones_own_are_followed_and_judged_by_where_they_lead(home, tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (home / "link").symlink_to("../real")
    assert fault(home / "link", "own") is None
    real.chmod(0o777)
    assert str(real) in (fault(home / "link", "own") or "")
    (home / "loop").symlink_to("loop")
    assert "too many symbolic links" in (fault(home / "loop", "own") or "")


def test_a_strangers_link_in_tmp_is_not_followed(tmp_path, home):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "cache"
    link.symlink_to(home)
    give_away(link)
    assert f"{link} belongs to" in (fault(link, "own") or "")


def test_in_a_container_that_shows_no_root_the_unknown_owner_of_a_parent_is_root(home, monkeypatch):
    below = home / "below"
    below.mkdir(mode=0o700)
    give_away(home, user=65_534)
    assert fault(below, "own")
    monkeypatch.setattr(ownership, "_unseen_owner", lambda: 65_534)
    assert fault(below, "own") is None
    assert fault(home, "own") is not None  # as the last of a path it is nobody's


def test_the_error_says_what_and_what_next(home):
    home.chmod(0o777)
    with pytest.raises(
        InvalidRequestError, match=r"^HPC_SERVE_X=\S+ is not used: .* by everybody .* Set it elsewhere\.$"
    ):
        require(home, "own", called=f"HPC_SERVE_X={home}", advice="Set it elsewhere.")


# -- containers that show no root: a user namespace in which one user is mapped

JUDGE = """
import json, os, sys
from pathlib import Path
sys.path[:0] = json.loads(os.environ["LIBRARIES"])
from hpc_serve.rendezvous.ownership import fault
print(json.dumps({f"{path} {use}": fault(Path(path), use) for path, use in json.loads(sys.argv[1])}))
"""


def judged_in_a_namespace(asked: list[tuple[Path, str]], *, maps_user: bool) -> dict[str, str | None]:
    """What `fault` says to an ordinary user in a user namespace that shows no root."""
    options = ["--map-current-user"] if maps_user else []
    as_user = ["setpriv", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    questions = json.dumps([(str(path), use) for path, use in asked])
    done = subprocess.run(
        [*as_user, "unshare", "--user", *options, sys.executable, "-I", "-S", "-c", JUDGE, questions],
        env={"LIBRARIES": json.dumps([str(CHECKOUT)]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if "unshare:" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"no user namespaces for users here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of root's, below folders of root's that nobody else can write to."""
    folder = Path(tempfile.mkdtemp(dir="/var/lib", prefix="hs-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def made(folder: Path, owner: int) -> Path:
    folder.mkdir(parents=True)
    os.chown(folder, owner, owner)
    return folder


@needs_root
def test_in_a_container_without_root_ones_own_folders_below_roots_are_used(shared):
    home = made(shared / "home", STRANGER)
    asked = [(home, "own"), (home / "new", "private"), (Path("/tmp"), "scratch")]
    told = judged_in_a_namespace(asked, maps_user=True)
    assert set(told.values()) == {None}, told


@needs_root
@pytest.mark.parametrize("owner", [0, STRANGER + 1])
def test_in_a_container_without_root_an_unseen_users_folder_where_all_may_write_is_not_roots(shared, owner):
    """Root and strangers show one number there, so what anybody may have made counts as a stranger's."""
    shared.chmod(0o1777)
    strangers = made(shared / "strangers", owner)
    (shared / "hpc-serve-args.txt").write_text("")  # words that run as the user must be the user's
    asked = [(made(strangers / "of-mine", STRANGER), "own"), (strangers, "scratch")]
    told = judged_in_a_namespace([*asked, (shared / "hpc-serve-args.txt", "read")], maps_user=True)
    assert all("a user that this container does not show" in str(reason) for reason in told.values()), told


@needs_root
def test_in_a_container_that_shows_the_user_as_nobody_nothing_is_used(shared):
    home = made(shared / "home", STRANGER + 1)
    told = judged_in_a_namespace([(home, "own"), (Path("/tmp"), "scratch")], maps_user=False)
    assert all("shows you and all other users as user 65534" in str(reason) for reason in told.values()), told


# -- access control lists

OWNER, USER, GROUP, NAMED_GROUP, MASK, OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
ALLOW, DENY, TO_GROUP = 0, 1, 0x40
NFS_READ, NFS_WRITE = 0x1, 0x2


def acl_for(named: tuple[int, int, int], *, mask: int = 7, others: int = 0) -> list[tuple[int, int, int]]:
    none = 0xFFFFFFFF
    return sorted([(OWNER, 7, none), named, (GROUP, 0, none), (MASK, mask, none), (OTHERS, others, none)])


@pytest.mark.parametrize(
    ("named", "mask", "says"),
    [
        ((USER, 7, STRANGER), 7, f"can be changed by user {STRANGER} by its ACL"),
        ((NAMED_GROUP, 7, STRANGER), 7, f"can be changed by group {STRANGER} by its ACL"),
        ((USER, 5, STRANGER), 7, None),
        ((USER, 7, STRANGER), 5, None),
        ((USER, 7, 0), 7, None),
    ],
)
@pytest.mark.parametrize("use", ["own", "read", "scratch"])
def test_an_acl_for_another_user_counts_though_the_mode_shows_ones_own_group(home, monkeypatch, named, mask, says, use):
    monkeypatch.setattr(ownership, "_is_own_group", lambda number, user: number == home.stat().st_gid)
    set_acl(home, "access", *acl_for(named, mask=mask))
    assert home.stat().st_mode & 0o070 == mask << 3
    found = fault(home, use)
    assert found == (f"{home} {says}" if says else None)
    below = home / "below"
    below.mkdir(mode=0o700)
    assert fault(below, use) == found


@pytest.mark.parametrize(
    ("entries", "writer"),
    [
        (acl_for((USER, 7, STRANGER)), f"user {STRANGER}"),
        (acl_for((USER, 5, STRANGER), others=7), "everybody"),
        (acl_for((USER, 5, STRANGER)), None),
    ],
)
def test_a_default_acl_counts_where_others_can_enter_the_folder(home, entries, writer):
    set_acl(home, "default", *entries)
    assert fault(home, "own") is None  # 0700: they do not come to the new files
    home.chmod(0o755)
    says = f"new files in {home} can be changed by {writer} by its default ACL"
    assert fault(home, "own") == (says if writer else None)
    new = home / "new"
    new.mkdir(mode=0o700)
    assert fault(new, "private") is None


def nfs_acl(*entries: tuple[int, int, int, str]) -> bytes:
    """NFSv4's ACL as Linux's client shows it: entries of type, flags, rights and name."""
    packed = [
        struct.pack(f">4I{-(-len(who) // 4) * 4}s", kind, flags, rights, len(who), who.encode())
        for kind, flags, rights, who in entries
    ]
    return struct.pack(">I", len(entries)) + b"".join(packed)


@pytest.mark.parametrize(
    ("use", "entries", "says"),
    [
        ("own", [(ALLOW, 0, NFS_WRITE, "mallory@site")], "can be changed by user mallory@site by its ACL"),
        ("own", [(ALLOW, TO_GROUP, NFS_WRITE, "staff@site")], "can be changed by group staff@site by its ACL"),
        ("own", [(ALLOW, 0, NFS_READ, "mallory@site"), (DENY, 0, NFS_WRITE, "mallory@site")], None),
        ("private", [(ALLOW, 0, NFS_READ, "mallory@site")], "can be read by user mallory@site by its ACL"),
        ("private", [(ALLOW, 0, NFS_READ | NFS_WRITE, "OWNER@"), (ALLOW, 0, NFS_WRITE, "root@site")], None),
    ],
)
def test_an_nfs4_acl_counts_though_the_mode_shows_nothing(home, monkeypatch, use, entries, says):
    show_acls(monkeypatch, {home: nfs_acl(*entries)})
    assert fault(home, use) == (f"{home} {says}" if says else None)


def test_where_no_acl_can_be_read_the_groups_write_counts(home, monkeypatch):
    monkeypatch.setattr(ownership, "_is_own_group", lambda number, user: True)
    show_acls(monkeypatch, {})
    assert fault(home, "own") is None
    home.chmod(0o770)
    for acls in ({}, {home: b"\0\0\0\7damaged"}):
        show_acls(monkeypatch, acls)
        assert "its file system does not show its ACL" in (fault(home, "own") or "")


def show_acls(monkeypatch: pytest.MonkeyPatch, acls: dict[Path, bytes]) -> None:
    """Let the kernel's answers be those of an NFSv4 file system."""

    def getxattr(path: Path, name: str) -> bytes:
        if name == "system.nfs4_acl" and path in acls:
            return acls[path]
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "getxattr", getxattr)
