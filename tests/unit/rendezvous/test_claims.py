"""Claims: whose a service's name is, and until when."""

import errno
import json
import subprocess
import sys
import time

import pytest

from hpc_serve.errors import ServiceConflictError, StoreError
from hpc_serve.rendezvous import claims
from hpc_serve.rendezvous.claims import claim, locked, release
from hpc_serve.rendezvous.record import EndpointRecord, JobEnd
from tests.support.at_once import at_once
from tests.support.stubs import make_record, make_submitted


def test_a_name_is_shared_by_replicas_of_one_model(store):
    claim(store, "405b", "m")
    store.write(make_record(model="m"))
    claim(store, "405b", "m")


@pytest.mark.parametrize("state", ["starting", "ready", "draining"])
def test_a_name_in_use_is_refused_to_another_model(store, state):
    store.write(make_record(model="m", state=state, stage="loading weights", job_id="12"))
    with pytest.raises(ServiceConflictError, match=rf"taken by m \(job 12, {state}: loading weights\).*--service"):
        claim(store, "405b", "other")


@pytest.mark.parametrize(
    "entry",
    [
        make_record(model="m", state="stopped"),
        make_record(model="m", state="failed"),
        make_record(model="m", updated_at=time.time() - 2 * 3600),  # not renewed for long
        make_submitted(model="m", end=JobEnd(state="stopped", reason="it was cancelled", at=1.0)),
    ],
)
def test_a_name_is_free_when_its_service_is_over(store, entry):
    claim(store, "405b", "m")
    (store.write if isinstance(entry, EndpointRecord) else store.write_submitted)(entry)
    claim(store, "405b", "other")


def test_a_name_is_free_when_the_scheduler_says_so(store):
    store.write(make_record(model="m", job_id="1"))
    store.write_submitted(make_submitted(model="m", job_id="2"))
    asked = []
    claim(store, "405b", "other", is_over=lambda holder: asked.append(holder.job_id) or True)
    assert sorted(asked) == ["1", "2"]


def test_a_job_in_the_queue_holds_its_name(store):
    store.write_submitted(make_submitted(model="m", job_id="2", submitted_at=time.time() - 24 * 3600))
    with pytest.raises(ServiceConflictError, match=r"job 2, submitted"):
        claim(store, "405b", "other")
    store.write(make_record(model="m", job_id="2", state="failed"))
    claim(store, "405b", "other")


def test_a_fresh_claim_holds_until_its_job_is_written_down_or_given_up(store):
    claim(store, "405b", "m")
    with pytest.raises(ServiceConflictError, match="claimed for m 0 s ago"):
        claim(store, "405b", "other")
    release(store, "405b", "other")
    with pytest.raises(ServiceConflictError):
        claim(store, "405b", "other")
    release(store, "405b", "m")
    claim(store, "405b", "other")


def test_an_old_claim_without_a_job_holds_nothing(store):
    claim(store, "405b", "m")
    path = store.service_dir("405b") / "service.json"
    claimed = json.loads(path.read_text())
    path.write_text(json.dumps({**claimed, "claimed_at": claimed["claimed_at"] - 30}))
    with pytest.raises(ServiceConflictError, match=r"claimed for m \d+ s ago"):
        claim(store, "405b", "other")
    path.write_text(json.dumps({**claimed, "claimed_at": claimed["claimed_at"] - 61}))
    claim(store, "405b", "other")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}'])
def test_a_damaged_claim_claims_nothing(store, content):
    store.ensure_service("405b")
    (store.service_dir("405b") / "service.json").write_text(content)
    claim(store, "405b", "m")


def test_of_two_claims_at_once_one_wins(store):
    def take(model):
        try:
            claim(store, "405b", model)
            return "taken"
        except ServiceConflictError:
            return "refused"

    assert sorted(at_once(lambda: take("m"), lambda: take("other"))) == ["refused", "taken"]


def test_the_lock_of_a_process_that_died_is_broken(store):
    store.ensure_service("405b")
    code = (
        "import os, sys, pathlib; from hpc_serve.rendezvous.store import ServiceStore\n"
        "from hpc_serve.rendezvous.claims import locked\n"
        "with locked(ServiceStore(pathlib.Path(sys.argv[1])), '405b'): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(store.home)], check=False).returncode == 9
    assert (store.service_dir("405b") / ".lock").exists()
    claim(store, "405b", "m")
    assert not (store.service_dir("405b") / ".lock").exists()


def test_a_lock_that_filelock_does_not_break_is_broken(store, monkeypatch):
    monkeypatch.setattr(claims, "_LOCK_LEASE_S", 0.3)
    store.ensure_service("405b")
    path = store.service_dir("405b") / ".lock"
    path.touch(mode=0o600)  # whoever made it was killed before it wrote
    claim(store, "405b", "m")
    assert not path.exists()


def test_a_lock_that_is_held_is_waited_for_and_then_explained(store, monkeypatch):
    monkeypatch.setattr(claims, "_LOCK_LEASE_S", 0.3)
    monkeypatch.setattr(claims, "_LOCK_TIMEOUT_S", 1.5)
    store.ensure_service("405b")
    with locked(store, "405b"), pytest.raises(StoreError, match=r"cannot lock .*\.lock within"):
        locked(store, "405b").__enter__()


def test_a_full_disk_is_not_taken_for_a_lock_that_is_held(store, monkeypatch):
    def refuse(lease):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    store.ensure_service("405b")
    monkeypatch.setattr("filelock.SoftFileLease.acquire", refuse)
    with pytest.raises(StoreError, match=r"cannot lock .*\.lock: Disk quota exceeded\. .*free space"):
        locked(store, "405b").__enter__()
