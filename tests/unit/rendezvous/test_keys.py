"""The key of a service: made once, private, and never shown."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous import shares
from tests.support.refusals import refuse
from tests.support.strangers import needs_root


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
    start = threading.Barrier(8)

    def make(_):
        start.wait()
        return store.ensure_api_key("405b").read_text()

    with ThreadPoolExecutor(8) as makers:
        assert set(makers.map(make, range(8))) == {store.read_api_key("405b") + "\n"}


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
