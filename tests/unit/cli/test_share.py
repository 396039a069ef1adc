"""`submit --share GROUP`: whom it lets in, how long that lasts, and what is refused before anything is submitted."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from hpc_serve.rendezvous.ownership import group_name
from hpc_serve.rendezvous.store import ServiceStore

SHARED = 0o3750


@pytest.fixture
def store(open_folder, monkeypatch) -> ServiceStore:
    """A home that every user can reach, with a queue that has no jobs."""
    monkeypatch.setenv("HPC_SERVE_HOME", str(open_folder / "home"))
    return ServiceStore(open_folder / "home")


@pytest.fixture
def group() -> str:
    return group_name(os.getegid())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def queued(stand_ins, *job_ids: str) -> None:
    stand_ins.queue(*((one, "RUNNING", "None") for one in job_ids), name="hpc-serve-8b")
    for one in job_ids:
        stand_ins.job(one, "RUNNING", name="hpc-serve-8b")


def test_the_group_and_the_services_path_are_told(store, group, ran):
    folder = store.service_dir("8b")
    assert f"  shared  with group {group}, who name it {folder}\n" in ran(["submit", "8b", "--share", group]).out
    said = json.loads(ran(["submit", "8b", "--name", "mine", "--json", "--share", group]).out)
    assert (said["shared_with"], said["folder"]) == (group, str(store.service_dir("mine")))
    assert "shared_with" not in json.loads(ran(["submit", "8b", "--name", "other", "--json"]).out)
    modes = {name: mode(store.service_dir(name)) for name in store.services()}
    assert modes == {"8b": SHARED, "mine": SHARED, "other": 0o700}
    assert (mode(store.home), mode(store.home / "services")) == (0o710, 0o710)
    assert (mode(store.api_key_path("8b")), mode(store.api_key_path("other"))) == (0o640, 0o600)
    private = ("submitted", "logs", "scripts", "service.json", "wanted.json")
    assert {mode(folder / name) & 0o077 for name in private} == {0}


def test_a_share_lasts_while_jobs_are_there_and_a_new_start_without_it_has_a_new_key(stand_ins, store, group, ran):
    ran(["submit", "8b", "--share", group])
    key, queued_id = store.read_api_key("8b"), store.read_submitted("8b")[-1].job_id
    queued(stand_ins, queued_id)
    for words in (["submit", "8b"], ["scale", "8b", "3"]):
        ran(words)
        assert mode(store.service_dir("8b")) == SHARED, words
        queued(stand_ins, *(job.job_id for job in store.read_submitted("8b")))
    assert store.read_api_key("8b") == key
    stand_ins.queue()
    for job in store.read_submitted("8b"):
        stand_ins.job(job.job_id, "CANCELLED", name="hpc-serve-8b")
    assert "shared" not in ran(["submit", "8b"]).out
    assert mode(store.service_dir("8b")) == 0o700
    assert store.read_api_key("8b") != key


@pytest.mark.parametrize(
    ("share", "says"),
    [("no-such-group", "no such group"), ("", "no such group"), ("games", "you are not in that group")],
)
def test_a_group_that_cannot_be_is_refused_before_anything_is_submitted(stand_ins, store, ran, share, says):
    assert says in ran(["submit", "8b", "--share", share], 2).err
    assert stand_ins.scripts == []
    assert store.services() == ()


def test_a_home_that_the_group_cannot_reach_is_refused(stand_ins, store, group, ran):
    store.home.parent.chmod(0o700)
    said = ran(["submit", "8b", "--share", group], 2).err
    assert f"{store.home.parent} lets nobody of it through" in said
    assert stand_ins.scripts == []


def test_a_home_of_nobody_names_no_service(store, ran):
    assert "cannot name a service" in ran(["status", "~nobody-at-all/services/70b"], 2).err
