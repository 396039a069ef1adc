"""Private files: a key is made once; whatever takes a file's place, a reader gets one of ours, whole, or an error.

A process renames files over the one that is read, as fast as it can: our own of two lengths, a stranger's, one that
others can write to, a link to a stranger's, a pipe and a folder.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.rendezvous import shares
from hpc_serve.rendezvous.files import read_private
from tests.support.at_once import at_once
from tests.support.refusals import refuse
from tests.support.strangers import STRANGER, needs_root


def test_a_key_is_made_once(store):
    with pytest.raises(StoreError, match="no API key yet"):
        store.read_api_key("405b")
    path = store.ensure_api_key("405b")
    key = store.read_api_key("405b")
    assert len(key) >= 32
    assert (store.ensure_api_key("405b"), store.read_api_key("405b")) == (path, key)
    store.ensure_api_key("8b")
    assert store.read_api_key("8b") != key


def test_makers_at_once_end_with_one_key(store):
    made = at_once(*[lambda: store.ensure_api_key("405b").read_text()] * 8)
    assert set(made) == {store.read_api_key("405b") + "\n"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_filesystem_without_links_has_keys_too(store, monkeypatch, number):
    refuse(monkeypatch, os, "link", number)
    store.ensure_api_key("405b")
    key = store.read_api_key("405b")
    store.ensure_api_key("405b")
    assert store.read_api_key("405b") == key


def test_a_key_that_others_can_read_is_refused(store):
    path = store.ensure_api_key("405b")
    path.chmod(0o640)
    for use in (store.ensure_api_key, store.read_api_key):
        with pytest.raises(RecordError, match=r"read by others \(mode 0640\)"):
            use("405b")


@pytest.mark.parametrize("content", ["", "short", "with a blank in it", "x" * 20 + "\n" + "y" * 20])
def test_a_key_that_cannot_be_one_is_refused_without_showing_it(store, content):
    path = store.ensure_api_key("405b")
    path.write_text(content)
    with pytest.raises(RecordError, match="no usable key") as refusal:
        store.read_api_key("405b")
    assert not content or content not in str(refusal.value)


@needs_root
def test_a_key_that_others_can_read_is_refused_also_in_a_shared_folder(store):
    store.ensure_api_key("70b")
    shares.share(store, "70b", 60)
    assert store.read_api_key("70b")
    key = store.api_key_path("70b")
    for mode, group in ((0o644, 60), (0o660, 60), (0o640, 61)):
        os.chown(key, 0, group)
        key.chmod(mode)
        with pytest.raises(RecordError):
            store.read_api_key("70b")


CHANGES = 300
OURS = ("--seed 1", "--seed " + "1" * 3_000)
THEIRS = "--seed 666"


def make_all(folder: Path) -> list[Callable[[Path], None]]:
    """Return makers of what takes the file's place, each under a new name."""
    theirs = folder / "theirs-behind-a-link"
    theirs.write_text(THEIRS)

    def write(path: Path, text: str, *, mode: int = 0o600, owner: int = 0) -> None:
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, owner, -1)

    os.chown(theirs, STRANGER, -1)
    return [
        lambda path: write(path, OURS[0]),
        lambda path: write(path, THEIRS, owner=STRANGER),
        lambda path: write(path, OURS[1]),
        lambda path: write(path, THEIRS, mode=0o666),
        lambda path: path.symlink_to(theirs),
        lambda path: write(path, OURS[0]),
        os.mkfifo,
        lambda path: path.mkdir(),
    ]


def swap_without_end(path: Path, beside: Path) -> None:
    for number, make in zip(itertools.count(), itertools.cycle(make_all(beside)), strict=False):
        made = beside / f"new-{number}"
        make(made)
        if path.is_dir() != made.is_dir():  # a rename replaces files by files alone
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        made.rename(path)


@contextmanager
def swapped(path: Path, beside: Path) -> Iterator[Callable[[], bool]]:
    """Replace `path` without pause; yields whether that still goes on. `beside` is where the replacements are made."""
    process = multiprocessing.get_context("fork").Process(target=swap_without_end, args=(path, beside))
    process.start()
    try:
        yield process.is_alive
    finally:
        process.kill()
        process.join()


def outcomes(read: Callable[[], object], path: Path, beside: Path) -> set[object]:
    """Return what `read` returned or raised while `path` was swapped, until that has changed often enough."""
    beside.mkdir()
    seen: list[object] = [None]
    with swapped(path, beside) as goes_on:
        while len(seen) < CHANGES:
            try:
                found = read()
            except (HpcServeError, FileNotFoundError) as error:
                found = type(error)
            if found != seen[-1]:
                seen.append(found)
            assert goes_on()
    return set(seen[1:])


@needs_root
def test_a_swapped_file_is_one_of_ours_whole_or_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    found = outcomes(lambda: read_private(home / "record"), home / "record", tmp_path / "beside")
    assert set(OURS) < found <= {*OURS, RecordError, StoreError, FileNotFoundError}
