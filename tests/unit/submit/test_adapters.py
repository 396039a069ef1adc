"""Adapters of a service: all replicas have one, or none. Stub engines, and a launcher's part that loads adapters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.cli.main import run
from hpc_serve.client import connect
from hpc_serve.job.engine.engine_watch import Adapters
from hpc_serve.job.engine.health import EngineAddress
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.record import Adapter
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.trust.connection import Identity
from tests.support.adapters import make_adapter
from tests.support.fake_slurm import FakeSlurm
from tests.support.patience import connect_to_all, wait_until
from tests.support.stubs import StubService, make_submitted
from tests.unit.submit.service_8b import MODEL, submit

ROOM = ("--enable-lora", "--max-lora-rank", "8")


class Launchers:
    """Replicas of the service 8b whose launchers look after their adapters, in one thread."""

    def __init__(self, home: Path, slurm: FakeSlurm) -> None:
        self._slurm = slurm
        self.stubs = StubService(home, "8b")
        self.keepers: list[RecordKeeper] = []
        self._running: list[concurrent.futures.Future[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, *words: str, has_room: bool = True) -> None:
        job_id = str(100 + len(self.keepers))
        self._slurm.job(job_id, "RUNNING")
        job = make_submitted(service="8b", model=MODEL, job_id=job_id, engine_args=words or ROOM)
        self.stubs.store.write_submitted(job)
        engine = self.stubs.start(*(words or ROOM), job_id=job_id, model=MODEL, state="starting")
        (record,) = (one for one in self.stubs.store.read("8b").records if one.job_id == job_id)
        identity = Identity.of(record, self.stubs.store.read_api_key("8b"))
        keeper = RecordKeeper(self.stubs.store, record)
        self.keepers.append(keeper)
        address = EngineAddress(host="127.0.0.1", port=engine.port, identity=identity)
        running = self._run(Adapters(address, keeper, has_room=has_room), keeper)
        self._running.append(asyncio.run_coroutine_threadsafe(running, self._loop))
        wait_until(lambda: keeper.record.state == "ready")

    async def _run(self, adapters: Adapters, keeper: RecordKeeper) -> None:
        await adapters.bring()
        keeper.update(state="ready")
        await asyncio.gather(adapters.follow(), keeper.renew())

    def pause(self) -> None:
        """Let the launchers look after nothing any more."""
        for running in self._running:
            running.cancel()

    async def _end(self) -> None:
        """Stop the loop once all that was cancelled has ended."""
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        self._loop.stop()

    def close(self) -> None:
        self.pause()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(timeout=60)
        assert not asyncio.all_tasks(self._loop)
        self._loop.close()
        self.stubs.close()


@pytest.fixture
def launchers(store, slurm, monkeypatch) -> Iterator[Launchers]:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    launchers = Launchers(store.home, slurm)
    yield launchers
    launchers.close()


@pytest.fixture
def good(tmp_path) -> Path:
    return make_adapter(tmp_path / "good", hidden=4096, layers=1, rank=1, base_model_name_or_path=f"x/{MODEL}")


@pytest.fixture
def add(ran):
    """Adds an adapter to 8b, which must end with this exit code; returns what it printed."""

    def add_it(folder: Path | str, code: int = 0, name: str = "sql") -> Any:
        return ran(["adapter", "add", "8b", name, str(folder)], code)

    return add_it


def answer_of(model: str, client: Any = None) -> str:
    client = client or connect("8b")
    return str(client.completions.create(model=model, prompt="Why?").choices[0].text)


def test_all_replicas_load_it_and_one_that_comes_later_before_it_is_ready(launchers, good, ran, add):
    launchers.start()
    launchers.start()
    assert add(good).out.splitlines() == ["2 replicas (100, 101) have loaded sql.", "Ask for it as the model 'sql'."]
    launchers.start()
    assert launchers.keepers[2].record.adapter_names == ("sql",)
    assert {answer_of("sql").split()[0] for _ in range(6)} == {f"adapter-{good}"}
    (listed,) = json.loads(ran(["adapter", "list", "8b", "--json"]).out)
    assert (listed["loaded"], listed["faults"], listed["path"]) == (["100", "101", "102"], {}, str(good))

    assert run(["adapter", "remove", "8b", "sql"]) == 0
    assert all(not keeper.record.adapters for keeper in launchers.keepers)
    with pytest.raises(Exception, match="`sql` does not exist"):
        answer_of("sql")


def test_what_one_replica_does_not_take_no_replica_keeps(launchers, good, tmp_path, add):
    launchers.start()
    launchers.start()
    add(good)
    launchers.stubs.engines[1].kill()
    newer = make_adapter(tmp_path / "newer", hidden=4096, layers=1, rank=1)
    said = add(newer, 2).err
    assert f"8b did not take the adapter sql, and {good} is loaded again. 101: the engine did not answer" in said
    assert read_wanted(launchers.stubs.store, "8b").adapters["sql"].path == str(good)
    first = launchers.keepers[0]
    wait_until(lambda: first.record.adapters["sql"].path == str(good) and not first.record.adapters["sql"].fault)

    other = make_adapter(tmp_path / "third", hidden=4096, layers=1, rank=1)
    assert "it is unloaded where it was loaded" in add(other, 2, name="poem").err
    wait_until(lambda: set(first.record.adapters) == {"sql"})


def test_it_is_checked_before_an_engine_sees_it(launchers, good, ran, tmp_path, add):
    launchers.start()
    wide = make_adapter(tmp_path / "wide", hidden=4096, layers=1, rank=16)
    other = make_adapter(tmp_path / "other", hidden=4160, layers=1, rank=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = make_adapter(tmp_path / "torn", hidden=4096, layers=1, rank=1)
    (torn / "adapter_model.safetensors").write_bytes(b"no")
    for name, source, said in (
        ("sql", wide, "was started for ranks of 8 at most, and"),
        ("sql", other, "has no such matrix"),
        ("sql", empty, "it has no adapter_config.json and no adapter_model.safetensors"),
        ("sql", torn, "cannot be read: it ends within its header"),
        ("sql", "org/none", "Fetch it first: hpc-serve fetch org/none"),
        ("sql", tmp_path / "none", "nor an adapter in the Hugging Face cache.\n"),
        ("a/b", good, "cannot name an adapter"),
        ("8b", good, "is a name of 8b itself"),
        ("405b", good, "is a name of 8b itself"),
    ):
        assert said in add(source, 2, name=name).err
    assert read_wanted(launchers.stubs.store, "8b") is None
    assert "8b has no adapter sql; it has none." in ran(["adapter", "remove", "8b", "sql"], 2).err


def test_a_service_without_room_says_how_to_start_it(launchers, good, add):
    launchers.start("--max-model-len", "2048", has_room=False)
    assert "without room for adapters: submit it with -- --enable-lora --max-lora-rank 1" in add(good, 2).err


def test_a_replica_of_other_options_says_that_it_has_no_room(launchers, good, store, add):
    launchers.start()
    add(good)
    launchers.start(*ROOM, "--api-server-count", "2", has_room=False)
    assert "no room for adapters" in launchers.keepers[1].record.adapters["sql"].fault
    client = connect_to_all(launchers.stubs, 2)  # it asks the one that has it
    assert {answer_of("sql", client).split()[0] for _ in range(6)} == {f"adapter-{good}"}
    client._watch.pool.drop(launchers.keepers[0].record.name)  # as before the first one has answered `connect`
    assert answer_of("sql", client).split()[0] == f"adapter-{good}"


def test_changed_files_in_the_same_folder_are_no_other_adapter(launchers, good, add):
    launchers.start()
    for note in ("", "Changed files need another folder"):
        assert note in add(good).out
    added = read_wanted(launchers.stubs.store, "8b").adapters["sql"].added_at
    assert launchers.keepers[0].record.adapters["sql"].added_at == added


@pytest.mark.parametrize(
    ("base", "shown"),
    [("m/Llama-3.1-8B", "m/Llama-3.1-8B"), ("x/\x1b]0;title\x07", "x/\\x1b]0;title\\x07")],
    ids=["another", "moves no cursor"],
)
def test_an_adapter_of_another_model_is_told(launchers, tmp_path, base, shown, add):
    launchers.start()
    of_base = make_adapter(tmp_path / "of", hidden=4096, layers=1, rank=1, base_model_name_or_path=base)
    out = add(of_base).out
    assert f"note: It was trained on {shown}, and the service has {MODEL}." in out


def test_what_vllm_s_cpu_backend_does_to_other_requests_is_told(launchers, good, ran, add):
    launchers.start()
    (job,) = launchers.stubs.store.read_submitted("8b")
    launchers.stubs.store.write_submitted(replace(job, gpu="cpu-spr-2s"))
    assert "note: On CPUs vLLM 0.32 answers a request for the model itself with an adapter" in add(good).out
    out = ran(["plan", "8b", "--gpu", "cpu-spr-2s", "--gpu-memory", "64GiB", "--enable-lora"]).out
    assert "On CPUs vLLM 0.32 answers" in " ".join(out.split())


def test_a_service_that_sleeps_has_it_when_it_wakes_and_one_that_is_over_has_none(store, slurm, good, add):
    submit(engine_args=ROOM)
    change_wanted(store, "8b", lambda found: replace(found, state="asleep", count=0))
    slurm.job("101", "COMPLETED", nodes="")
    assert "0 replicas have loaded sql." in add(good).out
    submit(engine_args=ROOM)
    assert set(read_wanted(store, "8b").adapters) == {"sql"}


def add_in_the_background(launchers, folder) -> concurrent.futures.Future[int]:
    """Add sql to 8b, one of whose replicas never answers; returns once it is wanted."""
    launchers.start()
    launchers.pause()
    adding = concurrent.futures.ThreadPoolExecutor(1).submit(run, ["adapter", "add", "8b", "sql", str(folder)])
    wait_until(lambda: "sql" in (read_wanted(launchers.stubs.store, "8b") or Wanted(least=0, most=1, count=0)).adapters)
    return adding


def test_who_adds_what_somebody_else_removes_is_told(launchers, good, capsys):
    adding = add_in_the_background(launchers, good)
    change_wanted(launchers.stubs.store, "8b", lambda found: replace(found, adapters={}))
    assert adding.result(timeout=30) == 2
    assert "Somebody else has added or removed sql meanwhile" in capsys.readouterr().err


def test_an_add_that_is_broken_off_is_taken_back(launchers, good, monkeypatch):
    launchers.start()
    launchers.pause()
    sleep = time.sleep
    is_wanted: list[bool] = []

    def interrupt_once_it_is_wanted(seconds: float) -> None:
        if read_wanted(launchers.stubs.store, "8b") is not None and not is_wanted:
            is_wanted.append(True)
            raise KeyboardInterrupt
        sleep(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", interrupt_once_it_is_wanted)
        assert run(["adapter", "add", "8b", "sql", str(good)]) == 130
    assert read_wanted(launchers.stubs.store, "8b").adapters == {}


def test_only_a_service_that_is_there_has_adapters(launchers, good, ran):
    launchers.start()
    assert run(["adapter", "list", "8b"]) == 0
    assert run(["adapter", "list", "9b"]) == 5
    said = ran(["adapter", "add", "100", "sql", str(good)], 2).err
    assert "100 is no service: adapters are of all replicas of 8b." in said


def test_what_an_engine_says_at_length_is_cut(launchers, store):
    gone = Adapter(path="/gone" + "/and gone" * 1000, added_at=1.0)
    change_wanted(store, "8b", lambda found: Wanted(least=1, most=1, count=1, adapters={"sql": gone}))
    launchers.start()
    fault = launchers.keepers[0].record.adapters["sql"].fault
    assert fault.startswith("No adapter found for /gone/and")
    assert len(fault) <= 1000


def test_a_replica_that_starts_again_has_not_loaded_it_yet(launchers, good, ran, add):
    launchers.start()
    add(good)
    launchers.keepers[0].update(state="starting")
    wait_until(lambda: launchers.stubs.store.read("8b").records[0].state == "starting")
    assert json.loads(ran(["adapter", "list", "8b", "--json"]).out)[0]["loaded"] == []


class TestSubmit:
    def test_lora_makes_room_and_is_wanted(self, store, slurm, good):
        assert run(["submit", "8b", "--lora", f"sql={good}", "--lora", f"poem={good}"]) == 0
        (script,) = slurm.scripts
        assert "--enable-lora --max-loras 2 --max-lora-rank 1 --max-cpu-loras 64" in script
        wanted = read_wanted(store, "8b").adapters
        assert {name: one.path for name, one in wanted.items()} == dict.fromkeys(("sql", "poem"), str(good))

    def test_a_submission_of_a_service_that_is_over_begins_without_adapters(self, store, slurm, good):
        assert run(["submit", "8b", "--lora", f"sql={good}"]) == 0
        slurm.job("101", "CANCELLED", after_cancel=True, nodes="")
        assert run(["stop", "8b"]) == 0
        assert run(["submit", "8b"]) == 0
        assert read_wanted(store, "8b").adapters == {}

    def test_what_is_no_adapter_submits_nothing(self, store, slurm, good, tmp_path, ran):
        other = make_adapter(tmp_path / "other", hidden=4160, layers=1, rank=1)
        wide = make_adapter(tmp_path / "wide", hidden=4096, layers=1, rank=16)
        for words, said in (
            ((f"sql={other}",), "has no such matrix"),
            (("sql",), "write NAME=FOLDER"),
            ((f"sql={tmp_path}",), "is no adapter"),
            ((f"sql={wide}", "--max-lora-rank", "8"), "started for ranks of 8 at most"),
        ):
            assert said in ran(["submit", "8b", "--lora", *words], 2).err
        assert slurm.scripts == []
