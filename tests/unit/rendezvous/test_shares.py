"""A service that is shared with a Unix group: what the group reads, what nobody else does, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_serve.errors import StoreError
from hpc_serve.rendezvous import shares
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.refusals import refuse
from tests.support.strangers import give_away
from tests.unit.rendezvous.conftest import set_acl
from tests.unit.rendezvous.people import (
    AS_OWNER,
    GROUP,
    GROUP_NUMBER,
    MEMBER,
    NOBODY,
    OTHER,
    OTHER_NUMBER,
    OWNER,
    STRANGER,
    People,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def people() -> Iterator[People]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="hs-share-"))
    os.chown(folder, OWNER, OWNER)
    folder.chmod(0o711)
    try:
        yield People(folder / "home")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def shared(people) -> People:
    """70b is shared, and 8b is not."""
    said = people.owner(f"begin('70b'); begin('8b'); shares.share(store, '70b', shares.check_share(store, {GROUP!r}))")
    assert not said, said
    return people


WHOLE = [["123-r0-0.json"], 43, [], "70b"]


def test_without_a_share_others_see_nothing(people):
    assert not people.owner("begin('70b')")
    for groups in ((), (GROUP,)):
        assert "Permission denied" in people.read(MEMBER, "70b", *groups)
        assert people.seen(MEMBER, *groups) == []


def test_with_a_share_the_group_reads_the_records_and_the_key_of_that_service_alone(shared):
    assert shared.read(MEMBER, "70b", GROUP) == WHOLE
    assert "Permission denied" in shared.read(MEMBER, "8b", GROUP)
    assert shared.seen(MEMBER, GROUP) == []  # the folders above show no names
    inside = shared.service.seen(MEMBER, GROUP)
    assert inside == ["", "/123-r0-0.json", "/api_key"]
    for groups in ((), (OTHER,)):
        assert "Permission denied" in shared.read(STRANGER, "70b", *groups)
        assert shared.service.seen(STRANGER, *groups) == []
    assert shared.read(OWNER, "70b") == WHOLE


def test_the_names_that_the_group_sees_are_of_that_service_alone(shared):
    named = "print(json.dumps(sorted(os.listdir(f'{home}/services/70b'))))"
    listed = json.loads(shared.run(MEMBER, named, groups=(GROUP,)).stdout)
    assert listed == ["123-r0-0.json", "api_key", "logs", "submitted", "wanted.json"]
    for folder in ("", "/services", "/services/8b", "/services/70b/logs", "/services/70b/submitted"):
        done = shared.run(MEMBER, f"os.listdir(home + {folder!r})", groups=(GROUP,))
        assert "Permission denied" in done.stderr, folder
    guess = "print(os.path.isdir(f'{home}/services/8b'), os.path.exists(f'{home}/services/9b'))"
    assert shared.run(MEMBER, guess, groups=(GROUP,)).stdout == "True False\n"
    assert shared.run(STRANGER, guess).stdout == "False False\n"
    text = (shared.service.home / "123-r0-0.json").read_text()
    assert "8b" not in text


def test_the_group_changes_nothing(shared):
    for code in (
        "Path(home, 'services/70b/123-r0-0.drain').write_text('{}')",
        "Path(home, 'services/70b/api_key').write_text('x')",
        "Path(home, 'services/70b/123-r0-0.json').unlink()",
        "Path(home, 'services/mine').mkdir()",
        "from hpc_serve.rendezvous.shares import named_service\n"
        "store, service = named_service(f'{home}/services/70b', Path('/nowhere'))\n"
        "store.ensure_service(service)",
    ):
        done = shared.run(MEMBER, code, groups=(GROUP,))
        assert done.returncode == 1
        assert "Permission denied" in done.stderr or "belongs to user 64001" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "before", ["", "store.api_key_path('70b').unlink(); store.ensure_api_key('70b')", "store.ensure_service('70b')"]
)
@pytest.mark.parametrize("makes_folders", [True, False])
def test_what_later_jobs_write_is_shared_also_by_a_process_without_the_group(shared, before, makes_folders):
    write = f"store.write(make_record(service='70b', job_id='124'), makes_folders={makes_folders})"
    assert not shared.owner(f"os.umask(0o077); {before}\n{write}", OTHER)
    names, length, problems, _ = shared.read(MEMBER, "70b", GROUP)
    assert (names, length, problems) == (["123-r0-0.json", "124-r0-0.json"], 43, [])
    assert shared.service.seen(MEMBER, GROUP) == ["", "/123-r0-0.json", "/124-r0-0.json", "/api_key"]
    assert "Permission denied" in shared.read(STRANGER, "70b")


def test_the_end_of_a_share_takes_its_key_out_of_use_and_no_other(shared):
    keys = [shared.home / "services" / service / "api_key" for service in ("70b", "8b")]
    before = [key.read_text() for key in keys]
    assert not shared.owner("shares.unshare(store, '70b'); shares.unshare(store, '8b')")
    assert "Permission denied" in shared.read(MEMBER, "70b", GROUP)
    assert [key.read_text() == text for key, text in zip(keys, before)] == [False, True]
    assert stat.S_IMODE(keys[0].stat().st_mode) == 0o600


def test_a_home_lets_one_group_through(shared):
    for service, says in (
        ("8b", f"is open to group {GROUP}"),
        ("70b", f"is shared with group {GROUP}, which has its key"),
    ):
        assert says in shared.owner(f"shares.share(store, {service!r}, {OTHER_NUMBER})", GROUP, OTHER)
    assert shared.read(MEMBER, "70b", GROUP) == WHOLE


def test_a_share_with_the_owners_primary_group_is_a_share_too(people):
    """The owner's primary group is OWNER, which the member is in, too."""
    assert not people.owner(f"begin('70b'); begin('8b'); shares.share(store, '70b', {OWNER})", OTHER)
    assert people.read(MEMBER, "70b", OWNER) == WHOLE
    said = people.owner(f"shares.share(store, '8b', {OTHER_NUMBER})", OTHER)
    assert f"is open to group {OWNER}" in said
    assert people.read(MEMBER, "70b", OWNER) == WHOLE


@pytest.mark.parametrize("group", [OWNER, GROUP_NUMBER])
def test_a_home_that_is_open_to_a_group_without_a_share_may_have_another_group(people, group):
    assert not people.owner("begin('70b'); begin('8b')")
    os.chown(people.home, OWNER, group)
    people.home.chmod(0o750)
    said = people.owner(f"shares.share(store, '8b', {OTHER_NUMBER})", OTHER)
    assert not said, said
    assert people.read(MEMBER, "8b", OTHER)[0] == WHOLE[0]
    assert "Permission denied" in people.read(MEMBER, "8b", GROUP)
    assert people.seen(MEMBER, GROUP) == []


def test_after_the_last_share_the_home_is_its_owners_alone(shared):
    assert not shared.owner(f"shares.share(store, '8b', {GROUP_NUMBER})")
    folders = (shared.home, shared.home / "services")
    for service, mode in (("70b", 0o710), ("8b", 0o700)):
        assert not shared.owner(f"shares.unshare(store, {service!r})")
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode, mode]
    assert not shared.owner(f"shares.share(store, '8b', {OTHER_NUMBER})", OTHER)


STOPPED = """
left, done = {left}, []
def stop_before(event, args):
    named = str(args[0]) if args else ""
    if event in ("os.chmod", "os.remove", "os.rename", "os.link") and named.startswith(home) and ".lock" not in named:
        done.append(event)
        if len(done) > left:
            os.kill(os.getpid(), 9)
sys.addaudithook(stop_before)
shares.unshare(store, "70b")
print(len(done))
"""


def test_the_end_of_a_share_that_was_killed_at_any_step_is_completed_by_the_next(people):
    left, ended = 0, False
    while not ended:
        shutil.rmtree(people.home, ignore_errors=True)
        begun = f"begin('70b'); shares.share(store, '70b', {GROUP_NUMBER})"
        assert not people.owner(begun)
        key = people.service.home / "api_key"
        before = key.read_text()
        done = people.run(OWNER, AS_OWNER + STOPPED.format(left=left), groups=(GROUP,))
        ended = done.returncode == 0
        assert ended or done.returncode == -9, done.stderr
        assert not people.owner("shares.unshare(store, '70b'); store.ensure_api_key('70b')"), left
        assert key.read_text() != before, left
        assert "Permission denied" in people.read(MEMBER, "70b", GROUP)
        for path in (people.home, people.home / "services", key.parent, key):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, (left, path)
        left += 1
    assert left > 3


@pytest.mark.parametrize(
    ("group", "says"),
    [
        *((name, "there is no such group") for name in ("no-such-group", "gämes\n", "")),
        (GROUP, "you are not in that group"),
    ],
)
def test_a_group_that_is_not_the_users_is_refused(people, group, says):
    said = people.owner(f"shares.check_share(store, {group!r})", OTHER)
    assert "InvalidRequestError" in said
    assert says in said


def test_a_home_that_the_group_cannot_reach_is_refused_until_a_mode_or_an_acl_lets_it_through(people):
    above = people.home.parent
    check = f"shares.check_share(store, {GROUP!r})"
    above.chmod(0o700)
    said = people.owner(check)
    assert f"{above} lets nobody of it through" in said
    assert f"setfacl -m g:{GROUP}:x {above}" in said
    entries = [(1, 7, NOBODY), (4, 0, NOBODY), (8, 1, GROUP_NUMBER), (16, 1, NOBODY), (32, 0, NOBODY)]
    set_acl(above, "access", *entries)
    assert not people.owner(check)
    os.removexattr(above, "system.posix_acl_access")
    os.chown(above, OWNER, GROUP_NUMBER)
    above.chmod(0o710)
    assert not people.owner(check)


def test_a_file_system_that_keeps_no_group_or_mode_is_refused(tmp_path, monkeypatch):
    store = ServiceStore(tmp_path / "home")
    store.ensure_api_key("70b")
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    with pytest.raises(StoreError, match="does not keep its group and mode"):
        shares.share(store, "70b", 60)
    monkeypatch.undo()
    refuse(monkeypatch, os, "fchown", errno.EPERM)
    with pytest.raises(StoreError, match="cannot share"):
        shares.share(store, "70b", 60)
    assert store.read_api_key("70b")


def test_rights_of_others_by_an_acl_do_not_come_to_count(people):
    assert not people.owner("begin('70b')")
    folder = people.service.home
    entries = [(1, 7, NOBODY), (2, 4, STRANGER), (4, 0, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)]
    for path, name in ((folder, "default"), (folder, "access"), (folder / "api_key", "access")):
        set_acl(path, name, *entries)
        path.chmod(0o700 if path == folder else 0o600)
    said = people.owner(f"shares.share(store, '70b', {GROUP_NUMBER})")
    assert not said, said
    assert not people.owner("store.write(make_record(service='70b', job_id='124'))")
    assert people.service.seen(STRANGER) == []
    assert people.service.seen(MEMBER, GROUP) == ["", "/123-r0-0.json", "/124-r0-0.json", "/api_key"]


# -- whom a member believes


@pytest.mark.parametrize("user", [STRANGER, MEMBER])
def test_a_record_of_another_than_the_owner_is_not_believed(shared, user):
    record = shared.service.home / "123-r0-0.json"
    os.chown(record, user, -1)
    record.chmod(0o644)
    names, _, problems, _ = shared.read(MEMBER, "70b", GROUP)
    assert names == []
    assert "belongs to user" in problems[0]


def test_a_folder_that_others_can_change_is_not_read(shared):
    (shared.home / "services").chmod(0o777)
    said = shared.read(MEMBER, "70b", GROUP)
    assert "can be changed by everybody" in said
    assert "only a folder that its owner alone can change is read" in said


def test_a_link_to_another_users_service_is_not_followed(shared):
    link = shared.home / "services" / "link"
    link.symlink_to("70b")
    give_away(link)
    assert "belongs to user" in shared.read(MEMBER, "link", GROUP)


@pytest.mark.parametrize("named", ["70b", "a/b", "services/70b", "/home/alice/70b", "what is a/b?"])
def test_only_the_path_of_a_services_folder_names_another_users(named, tmp_path):
    store, service = shares.named_service(named, tmp_path)
    assert (store.home, store.owner, service) == (tmp_path, None, named)


def test_a_folder_of_ones_own_is_named_by_its_path_too(tmp_path):
    ServiceStore(tmp_path).ensure_service("70b")
    store, service = shares.named_service(f"{tmp_path}/services/70b", Path("/nowhere"))
    assert (store.home, store.owner, service) == (tmp_path, None, "70b")
