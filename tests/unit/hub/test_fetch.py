"""Files of a hub come whole into the cache, each byte once, whatever breaks off meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_serve.errors import InvalidRequestError, StoreError, UnknownModelError
from hpc_serve.hub.fetch import HubConnectionError, cached_alone, look_for_model
from hpc_serve.hub.local_weights import cached_folder, missing_weights
from tests.support.fake_hub import COMMIT, model_files
from tests.unit.hub.conftest import MODEL

SHARD = "model-00002-of-00003.safetensors"
LARGE = 10_000
NEEDED = {"config.json", "model.safetensors.index.json", "tokenizer.json"}
NEEDED |= {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}


def fetch(settings, name: str = MODEL, **asked) -> Path:
    found = look_for_model(name, settings, **asked)
    found.fetch(lambda _: None)
    found.repository.note_revision(is_whole=True)
    return found.repository.snapshot


def unfinished(settings) -> list[Path]:
    return sorted(settings.cache.rglob("*.incomplete"))


def whole(hub) -> dict[str, bytes]:
    """The files that an engine reads, as the hub has them."""
    return {path: hub.models[MODEL][path] for path in NEEDED}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_an_engine_reads_is_there_and_nothing_else(hub, settings, tmp_path):
    folder = fetch(settings)
    assert content_of(folder) == whole(hub)
    assert cached_folder(MODEL, {"HF_HOME": str(tmp_path / "hf")}) == folder
    assert missing_weights(folder) is None
    assert unfinished(settings) == []


def test_a_second_time_nothing_is_fetched(hub, settings):
    fetch(settings)
    hub.ranges.clear()
    found = look_for_model(MODEL, settings)
    assert (found.missing, found.kept_bytes) == ((), found.total_bytes)
    assert "all of it is here" in found.words
    assert hub.ranges == []


def test_a_connection_that_breaks_goes_on_where_it_was(hub, settings, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.breaks[SHARD] = [1_000_000, 500_000]
    assert content_of(fetch(settings)) == whole(hub)
    offsets = [offset for path, offset in hub.ranges if path == SHARD]
    assert len(offsets) == 3
    assert 0 == offsets[0] < offsets[1] < offsets[2]


def test_a_hub_that_refuses_a_file_for_a_moment_is_asked_again(hub, settings):
    hub.refusals[SHARD] = [503, 503]
    told: list[int] = []
    found = look_for_model(MODEL, settings)
    found.fetch(told.append)
    assert content_of(found.repository.snapshot)[SHARD] == hub.models[MODEL][SHARD]
    assert told[-1] == found.total_bytes >= max(told)
    assert hub.sent("model-00001-of-00003.safetensors") == 1


def test_a_connection_that_brings_nothing_new_is_given_up_and_whole_files_stay(hub, settings):
    hub.breaks[SHARD] = [1_000_000] + [0] * 40
    with pytest.raises(HubConnectionError, match=r"It was tried 4 times\..* goes on from there"):
        fetch(settings)
    assert unfinished(settings) == []
    del hub.breaks[SHARD]
    hub.ranges.clear()
    assert content_of(fetch(settings)) == whole(hub)
    assert [path for path, _ in hub.ranges] == [SHARD]


def test_a_file_that_is_refused_ends_the_run_before_the_next_ones(hub, settings):
    hub.models[MODEL] = model_files(shards=9, shard_bytes=LARGE)
    shards = sorted(path for path in hub.models[MODEL] if path.startswith("model-0"))
    hub.refusals[shards[0]] = [403]
    hub.breaks, hub.hold = {shard: [0] for shard in shards[1:]}, threading.Event()
    ticks: list[int] = []

    def on_tick(done: int) -> None:
        ticks.append(done)
        if len(ticks) == 3:
            hub.hold.set()

    with pytest.raises(UnknownModelError, match=f"{shards[0]}: the hub answered HTTP 403"):
        look_for_model(MODEL, settings).fetch(on_tick)
    assert hub.sent(shards[3]) == 2
    assert hub.sent(shards[-1]) == 0


def test_a_file_of_another_size_than_the_hub_lists_is_not_kept(hub, settings):
    hub.given[SHARD] = bytes(1000)
    with pytest.raises(HubConnectionError, match="file should be of size 3145728 but has size 1000"):
        fetch(settings)
    hub.given.clear()
    assert content_of(fetch(settings)) == whole(hub)


def test_content_that_another_commit_has_comes_no_second_time(hub, settings):
    folder = fetch(settings)
    shutil.rmtree(folder)
    hub.ranges.clear()
    found = look_for_model(MODEL, settings)
    assert found.kept_bytes > 9 << 20
    found.fetch(lambda _: None)
    assert content_of(folder) == whole(hub)
    assert hub.ranges == []


def test_two_at_once_fetch_each_file_once(hub, settings):
    both = [look_for_model(MODEL, settings) for _ in range(2)]
    with ThreadPoolExecutor(2) as people:
        list(people.map(lambda found: found.fetch(lambda _: None), both))
    assert content_of(both[0].repository.snapshot) == whole(hub)
    assert sorted(path for path, _ in hub.ranges) == sorted(path for path in NEEDED if path.endswith(".safetensors"))


def test_parts_that_a_killed_run_left_are_removed_and_those_of_another_are_not(hub, settings):
    blobs = settings.cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "a.0.incomplete", blobs / "b.0.incomplete"
    old.touch()
    new.touch()
    os.utime(old, times=(1, 1))
    fetch(settings)
    assert unfinished(settings) == [new]


def test_a_file_that_was_cut_off_in_the_cache_comes_again(hub, settings):
    folder = fetch(settings)
    (folder / SHARD).resolve().write_bytes(b"short")
    (folder / "config.json").resolve().write_bytes(b"{}")
    assert len(look_for_model(MODEL, settings).missing) == 2
    assert content_of(fetch(settings)) == whole(hub)


def test_the_token_goes_to_the_hub_alone(hub, settings):
    fetch(replace(settings, token="hf_secret"))
    assert ("resolve", "Bearer hf_secret") in hub.tokens
    assert {shown for where, shown in hub.tokens if where == "storage"} == {""}


@pytest.mark.parametrize(
    ("token", "words"), [(None, "someone without a token has no access"), ("hf_mine", "your token has no access")]
)
def test_a_gated_model_says_where_its_licence_is(hub, settings, token, words):
    hub.gated = True
    with pytest.raises(UnknownModelError, match=f"accept its licence at {hub.url}/org/model") as refused:
        fetch(replace(settings, token=token))
    assert words in str(refused.value)
    assert "hf_mine" not in str(refused.value)
    assert hub.ranges == []


def test_a_model_or_a_revision_that_is_not_there_is_named(hub, settings):
    with pytest.raises(UnknownModelError, match="has no such model, or it is private"):
        fetch(settings, "org/nothing")
    with pytest.raises(UnknownModelError, match="has no revision 'v9'"):
        fetch(settings, revision="v9")


def test_a_commit_can_be_named(hub, settings):
    assert fetch(settings, revision=COMMIT).name == COMMIT
    assert not (settings.cache / "models--org--model" / "refs").exists()


def test_an_older_commit_stays_the_one_of_jobs_until_the_new_one_is_whole(hub, settings):
    ref = settings.cache / "models--org--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("older")
    hub.breaks[SHARD] = [0] * 40
    found = look_for_model(MODEL, settings)
    found.repository.note_revision(is_whole=False)
    with pytest.raises(HubConnectionError):
        found.fetch(lambda _: None)
    assert ref.read_text() == "older"
    del hub.breaks[SHARD]
    fetch(settings)
    assert ref.read_text() == COMMIT


def test_files_that_are_asked_for_come_too(hub, settings):
    hub.models["org/gguf"] = {"config.json": b"{}", "model-Q4.gguf": b"4" * LARGE, "model-Q8.gguf": b"8" * LARGE}
    with pytest.raises(UnknownModelError, match=r"no weights that vLLM takes by itself .* it has \.gguf, \.json"):
        fetch(settings, "org/gguf")
    folder = fetch(settings, "org/gguf", include=("*Q4*",))
    assert set(content_of(folder)) == {"config.json", "model-Q4.gguf"}


def test_no_room_is_said_before_a_byte_of_weights_comes(hub, settings, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    found = look_for_model(MODEL, settings)
    with pytest.raises(StoreError, match=r"needs 9 MiB more in .* has 5 MiB free.*HF_HOME"):
        found.check_space()
    assert hub.ranges == []


def test_a_disk_that_becomes_full_keeps_what_has_come(hub, settings, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs to mount a small filesystem")
    try:
        small = replace(settings, cache=disk / "hub")
        with pytest.raises(StoreError, match=r"No space left on device\. The files that are whole are kept"):
            fetch(small)
        assert sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) > 4 << 20
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        folder = fetch(small)
        assert content_of(folder) == whole(hub)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_hub_that_is_away_leaves_what_the_cache_has(hub, settings):
    hub.status = 503
    with pytest.raises(HubConnectionError):
        look_for_model(MODEL, settings)
    with pytest.raises(
        HubConnectionError, match=r"away, and of org/model .* holds none of its weights\. .*a login node"
    ):
        cached_alone(MODEL, settings, "main", "away")
    hub.status = 200
    folder = fetch(settings)
    assert cached_alone(MODEL, settings, "main", "away") == folder


def test_a_host_without_a_network_is_told_in_words(settings):
    unused = "http://127.0.0.1:9"
    with pytest.raises(HubConnectionError, match=f"the connection to {unused} failed: Connection refused$"):
        look_for_model(MODEL, replace(settings, endpoint=unused))
    with pytest.raises(InvalidRequestError, match="Unset these variables to fetch it"):
        cached_alone(MODEL, replace(settings, is_offline=True), "main", "offline")


def test_the_cache_is_one_that_huggingface_hub_reads(hub, settings):
    hub_library = pytest.importorskip("huggingface_hub")
    folder = fetch(settings)
    found = hub_library.snapshot_download(MODEL, cache_dir=settings.cache, local_files_only=True)
    assert os.path.samefile(found, folder)
    assert os.path.samefile(hub_library.try_to_load_from_cache(MODEL, SHARD, cache_dir=settings.cache), folder / SHARD)


@pytest.mark.parametrize(
    "path", ["../../../../../precious.json", "/precious.json", "a/../../precious.json", "a//b.json", "a\x1b[2J.json"]
)
def test_a_listing_that_leads_out_of_the_cache_is_refused_before_anything_is_touched(hub, settings, path, tmp_path):
    precious = tmp_path / "precious.json"
    precious.write_text("mine")
    hub.models[MODEL][path] = b"{}"
    with pytest.raises(UnknownModelError, match="would lead out of the cache"):
        look_for_model(MODEL, settings)
    assert precious.read_text() == "mine"
    assert not settings.cache.exists()


@pytest.mark.parametrize("commit", ["../../../elsewhere", "", "main"])
def test_a_commit_that_is_none_is_refused(hub, settings, monkeypatch, commit):
    monkeypatch.setattr("tests.support.fake_hub.COMMIT", commit)
    with pytest.raises(UnknownModelError, match="which is none"):
        look_for_model(MODEL, settings)


def test_what_a_link_out_of_the_cache_leads_to_stays(hub, settings, tmp_path):
    folder = fetch(settings)
    shared = tmp_path / "shared.safetensors"
    shared.write_bytes(b"a colleague's")
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(shared)
    assert content_of(fetch(settings)) == whole(hub)
    assert shared.read_bytes() == b"a colleague's"


@pytest.mark.parametrize("in_the_way", ["hf", "hf/hub/models--org--model", "hf/hub/models--org--model/refs"])
def test_a_file_in_the_place_of_the_cache_is_said_with_its_cure(hub, settings, tmp_path, in_the_way):
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).touch()
    with pytest.raises(StoreError, match=r"cannot be written to .*models--org--model: .*set HF_HOME to a folder"):
        fetch(settings)
