"""Models that a gateway starts when they are asked for: what follows, and with stub engines in place of jobs."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.background import in_background
from hpc_serve.cli.use.gateway import read_on_demand
from hpc_serve.client.discovery.wake import CommandFailedError
from hpc_serve.errors import SiteFileError, WaitTimeoutError
from hpc_serve.gateway.settings import ListedModel, OnDemand, Settings
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.submit.status.wanted_words import wanted_lines
from tests.cluster import wait_for
from tests.support.stubs import StubService, make_record

pytest.importorskip("prometheus_client", reason="the gateway needs it")
from hpc_serve.gateway import backend, directory, on_demand
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.backend import Backend
from hpc_serve.gateway.metrics import Counts
from hpc_serve.gateway.on_demand import Listed, decide, gpu_hours, hours_free_in_s

LIMITS = OnDemand(
    models={name: ListedModel(words=(name,), gpus=gpus) for name, gpus in (("a", 1), ("b", 1), ("c", 4))},
    most_services=2,
    most_gpus=5,
)


NOW_S = 5000.0


def running(ready_for_s: float | None = 1000.0, *, asked_for_s: float = 50.0, gpus: int = 1, **fields: Any) -> Listed:
    """A service whose start took 100 s."""
    times: dict[str, Any] = {"asked_at_s": NOW_S - asked_for_s}
    if ready_for_s is not None:
        times |= {"ready_at_s": NOW_S - ready_for_s, "begun_at_s": NOW_S - ready_for_s - 100.0}
    return Listed(gpus=gpus, **times, **fields)


@pytest.mark.parametrize(
    ("service", "waited_s", "there", "what", "which"),
    [
        ("a", 0, {}, "start", "a"),
        ("a", 0, {"b": running()}, "start", "a"),
        ("a", 0, {"b": running(), "c": running(gpus=4, asked_for_s=60)}, "end", "c"),
        ("c", 0, {"a": running(), "b": running(asked_for_s=40)}, "end", "a"),
        ("c", 0, {"a": running(under_way=1), "b": running(asked_for_s=40)}, "end", "b"),
        ("c", 0, {"a": running(under_way=1), "b": running(under_way=1)}, "wait", "c"),
        ("c", 100, {"a": running(under_way=1), "b": running(under_way=1, asked_for_s=40)}, "end", "a"),
        ("c", 9999, {"a": running(ready_for_s=None), "b": running(ready_for_s=99)}, "wait", "c"),
        ("c", 9999, {"a": running(is_ending=True), "b": running()}, "wait", "c"),
        ("c", 0, {"b": running(gpus=2)}, "end", "b"),
    ],
)
def test_the_one_that_was_asked_longest_ago_makes_room(service, waited_s, there, what, which):
    step = decide(service, NOW_S, waited_s, there, LIMITS, 0.0)
    assert (step.what, step.service) == (what, which)
    assert step.why


def test_nothing_is_started_once_the_gpu_hours_of_a_day_are_used():
    limits = replace(LIMITS, most_gpu_hours=10.0)
    assert decide("a", NOW_S, 0, {}, limits, 9.9).what == "start"
    step = decide("a", NOW_S, 9999, {"b": running()}, limits, 10.0)
    assert step.what == "wait"
    assert "10.0 GPU-hours in a day, and may use 10" in step.why


def test_gpu_hours_are_those_of_the_last_day():
    hour_s, now_s = 3600.0, 1e9

    def record(began_h: float, ended_h: float | None, *, state: str = "stopped", gpus: int = 4) -> Any:
        engine_at_s = now_s - hour_s * (ended_h or 0.0)
        fields = {"started_at": now_s - hour_s * began_h, "updated_at": engine_at_s, "num_nodes": 2}
        return make_record(state=state, gpus_per_node=gpus, lease_s=30.0, **fields)

    assert gpu_hours([record(3, 1)], now_s) == 16  # two hours of eight GPUs
    assert gpu_hours([record(30, 23)], now_s) == 8  # an hour of them was in the last day
    assert gpu_hours([record(2, None, state="ready")], now_s) == 16
    assert gpu_hours([record(2, 1, state="ready")], now_s) == 8  # it was heard of an hour ago
    assert gpu_hours([record(30, 25), record(3, 1, gpus=0)], now_s) == 0

    def free_in_h(most: float, *records: Any) -> float:
        return round(hours_free_in_s(records, now_s, most) / hour_s, 2)

    day = (record(23, 21), record(3, 1))  # 16 GPU-hours each
    assert free_in_h(33, *day) == 0
    assert free_in_h(32, *day) == 1  # the first hours begin to be older than a day
    assert free_in_h(24, *day) == 2
    assert free_in_h(16, *day) == 21
    assert free_in_h(8, *day) == 22
    assert free_in_h(16, record(2, None, state="ready")) == 22  # if it ended now


class Jobs:
    """What `hpc-serve submit` and `stop` would do, with a stub engine for each job."""

    def __init__(self, home: Path, names: tuple[str, ...]) -> None:
        self.services = {name: StubService(home, name) for name in names}
        self.job_ids: dict[str, str] = {}
        """Of the services that are there."""
        self.most = 0
        self.lines: list[str] = []
        self.fails = False
        self.load_s = 0.0
        self._lock = threading.Lock()

    def run(self, words: Any, home: Path) -> str:
        what, name = words[0], words[-1]
        service = self.services[name]
        with self._lock:
            self.lines.append(f"{what} {name}")
            number = str(len(self.lines))
            if self.fails:
                raise CommandFailedError("sbatch: no such partition")
            if what == "submit":
                self.job_ids[name] = number
                self.most = max(self.most, len(self.job_ids))
        if what == "submit":
            state = "starting" if self.load_s else "ready"
            engine = service.start("--stub-words", "3", job_id=number, state=state)
            if self.load_s:
                fields = {"job_id": number, "counter": 2}
                threading.Timer(self.load_s, service.publish, args=(engine,), kwargs=fields).start()
        else:
            (engine,) = service.engines
            service.publish(engine, job_id=self.job_ids[name], state="stopped")
            engine.kill()
            service.engines.clear()
            with self._lock:
                del self.job_ids[name]
        return ""


NAMES = ("a", "b", "c")


@pytest.fixture
def jobs(service, monkeypatch):
    jobs = Jobs(service.store.home, NAMES)
    monkeypatch.setattr(on_demand, "run_command", jobs.run)
    monkeypatch.setattr(on_demand, "LEAST_KEPT_S", 0.5)
    yield jobs
    for one in jobs.services.values():
        one.close()


def listed(**limits: Any) -> OnDemand:
    return OnDemand(models={name: ListedModel(words=(name,), gpus=1) for name in NAMES}, **limits)


def test_models_come_and_go_as_they_are_asked_for(jobs, gateway):
    front = gateway(on_demand=listed(most_services=2), wait_s=120.0)
    assert {card["id"] for card in front.ask("GET", "/v1/models").json["data"]} == set(NAMES)
    chance = random.Random(7)
    asked = [[chance.choice(NAMES) for _ in range(4)] for _ in range(6)]

    def ask(models: list[str]) -> list[int]:
        return [front.complete(model).status for model in models]

    with ThreadPoolExecutor(len(asked)) as threads:
        statuses = [status for found in threads.map(ask, asked) for status in found]
    assert statuses == [200] * 24
    assert jobs.most == 2
    assert {line for line in jobs.lines if line.startswith("submit")} == {f"submit {name}" for name in NAMES}


def test_what_was_done_and_why_is_written_down_for_status(jobs, gateway):
    for one in jobs.services.values():
        change_wanted(one.store, one.service, lambda found: Wanted(least=1, most=1, count=1))
    store = jobs.services["a"].store
    front = gateway(on_demand=listed(most_services=1), wait_s=60.0)
    assert front.complete("a").status == 200
    assert front.complete("b").status == 200

    def told() -> dict[str, list[str]]:
        return {name: [one.sentence for one in read_wanted(store, name).decided] for name in ("a", "b")}

    wait_for(lambda: len(told()["a"]) == 2 and told()["b"], 60, what="the decisions")
    started, ended = told()["a"]
    assert started == "submitted 1: a request asked the gateway for it"
    assert ended.startswith("ended: b is asked for and needs its room; it was last asked ")
    lines = wanted_lines("a", read_wanted(store, "a"), [], time.time())
    assert lines[0] == "a: a gateway starts and ends it"
    assert lines[1].endswith(started)


def test_a_model_that_cannot_be_submitted_is_told_and_not_tried_at_once(jobs, gateway):
    jobs.fails = True
    front = gateway(on_demand=listed(), wait_s=60.0)
    for _ in range(3):
        answer = front.complete("a")
        answer.check_refusal(503, "on_demand", "no such partition")
        assert int(answer.headers["retry-after"]) > 10
    assert jobs.lines == ["submit a"]


def test_who_waits_too_long_is_told_what_it_waits_for(jobs, gateway, monkeypatch):
    monkeypatch.setattr(on_demand, "LEAST_KEPT_S", 3600.0)
    front = gateway(on_demand=listed(most_services=1), wait_s=2.0)
    wait_for(lambda: front.complete("a").status == 200, 60, what="the first model")
    answer = front.complete("b")
    answer.check_refusal(503, "on_demand", "no room beside a")
    assert 3000 < int(answer.headers["retry-after"]) <= 3600
    assert front.complete("a").status == 200


def test_who_comes_back_after_each_refusal_has_waited_since_the_first(jobs, gateway, monkeypatch):
    """A model that is never idle makes room, even if its start took longer than a request waits."""
    monkeypatch.setenv("STUB_ENGINE_ARGS", "--stub-word-s 60")
    monkeypatch.setattr(on_demand, "LEAST_KEPT_S", 2.0)
    monkeypatch.setattr(directory, "LOOK_S", 0.2)
    jobs.load_s = 4.0
    front = gateway(on_demand=listed(most_services=1), wait_s=2.0)
    front.complete("a").check_refusal(503, "no_replica", "a")
    wait_for(lambda: front.ask("GET", "/v1/models").json["data"][0].get("max_model_len"), 60, what="the first model")
    in_background(front.complete, "a")
    deadline = time.monotonic() + 60
    while "stop a" not in jobs.lines:
        assert time.monotonic() < deadline, "it waited from the beginning each time"
        time.sleep(int(front.complete("b").headers["retry-after"]))
    wait_for(lambda: jobs.services["b"].engines, 60, what="the other model")


def test_who_waits_for_a_start_counts_as_waiting(jobs, gateway, monkeypatch):
    monkeypatch.setattr(on_demand, "LEAST_KEPT_S", 3600.0)
    front = gateway(on_demand=listed(most_services=1), wait_s=60.0, max_in_flight=1, most_queued=1)
    wait_for(lambda: front.complete("a").status == 200, 60, what="the first model")
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(front.complete, "b") for _ in range(3)]
        next(as_completed(asked, 40)).result().check_refusal(429, "queue_full", "b has 2 requests")
        monkeypatch.setattr(on_demand, "LEAST_KEPT_S", 0.5)
        assert sorted(one.result().status for one in asked) == [200, 200, 429]


def test_a_request_has_one_deadline_for_the_start_and_the_replica(service, monkeypatch):
    asked: list[float] = []

    async def bring(until_s: float, person: str) -> None:
        asked.append(until_s - asyncio.get_running_loop().time())

    async def wait() -> None:
        service.store.write(make_record(service="a", state="starting"))
        one = Backend(service.store, "a", Settings(wait_s=1.0), Counts())
        one.bring = bring
        with pytest.raises(WaitTimeoutError, match="a was not ready after 1 s: starting"):
            await one.ready()
        await one.close()

    monkeypatch.setattr(backend, "_BRING_AGAIN_S", 0.2)
    asyncio.run(wait())
    assert len(asked) > 1
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < 1.0


class Looks:
    """Services whose files are read at most once in a long while, unless a look must be new or takes `look_s`."""

    def __init__(self, store: ServiceStore, *, wait_s: float, look_s: float = 0.0) -> None:
        services: Any = self
        self.models = on_demand.OnDemandModels(store, listed(), services, wait_s=wait_s)
        self.there: dict[str, tuple[str, ...]] = {}
        self.seen: dict[str, tuple[str, ...]] = {}
        self._look_s = look_s

    async def look(self, *, older_than_s: float = 1.0) -> None:
        await asyncio.sleep(self._look_s)
        if self._look_s or not older_than_s:
            self.seen = dict(self.there)
            self.models.note_states()

    def states(self, service: str) -> tuple[str, ...] | None:
        return self.seen.get(service)

    def is_ready(self, service: str) -> bool:
        return "ready" in self.seen.get(service, ())

    def under_way(self, service: str) -> int:
        return 0


def test_over_the_gpu_hours_of_a_day_retry_after_is_when_some_are_left(jobs, gateway, service):
    began_s = time.time() - 10 * 3600
    fields = {"started_at": began_s, "updated_at": began_s + 3600, "num_nodes": 1, "gpus_per_node": 4}
    service.store.write(make_record(service="a", state="stopped", **fields))
    answer = gateway(on_demand=listed(most_gpu_hours=4.0), wait_s=3.0).complete("b")
    answer.check_refusal(503, "on_demand", "used 4.0 GPU-hours in a day")
    assert 14 * 3600 - 120 < int(answer.headers["retry-after"]) <= 14 * 3600 + 1


def test_what_was_submitted_is_not_submitted_again_before_the_next_look(service, monkeypatch):
    lines: list[Any] = []

    async def bring() -> None:
        looks = Looks(service.store, wait_s=60.0)

        def run(words: Any, home: Path) -> str:
            lines.append(words)
            looks.there[words[-1]] = ("starting",)
            return ""

        monkeypatch.setattr(on_demand, "run_command", run)
        await looks.models.bring("a", math.inf)
        await asyncio.sleep(20 * on_demand._LOOK_S)
        looks.models.close()

    monkeypatch.setattr(on_demand, "_LOOK_S", 0.01)
    asyncio.run(bring())
    assert lines == [["submit", "--once", "--json", "a"]]


@pytest.mark.parametrize(("said", "told"), [('{"is_there": true}', 0), ('{"is_there": false}', 1), ("", 1)])
def test_only_the_gateway_that_submitted_a_model_writes_it_down(jobs, gateway, monkeypatch, said, told):
    def run(words: Any, home: Path) -> str:
        jobs.run(words, home)
        return said

    monkeypatch.setattr(on_demand, "run_command", run)
    store = jobs.services["a"].store
    change_wanted(store, "a", lambda found: Wanted(least=1, most=1, count=1))
    front = gateway(on_demand=listed(), wait_s=60.0)
    assert front.complete("a").status == 200
    wait_for(lambda: front.metric("requests_total", status="200") == 1, 60, what="the count")
    assert len(read_wanted(store, "a").decided) == told


def test_a_slow_submission_holds_no_other_model_and_has_its_room(jobs, gateway, monkeypatch):
    goes_on = threading.Event()

    def run(words: Any, home: Path) -> str:
        if words[-1] == "a":
            assert goes_on.wait(120)
        return jobs.run(words, home)

    monkeypatch.setattr(on_demand, "run_command", run)
    front = gateway(on_demand=listed(most_services=2), wait_s=60.0)
    with ThreadPoolExecutor(3) as threads:
        asked = {name: threads.submit(front.complete, name) for name in ("a", "b")}
        assert asked["b"].result().status == 200
        asked["c"] = threads.submit(front.complete, "c")  # there is no room beside `a`, which is not there yet
        wait_for(lambda: "stop b" in jobs.lines, 60, what="the end of b")
        assert asked["c"].result().status == 200
        goes_on.set()
        assert asked["a"].result().status == 200
    assert jobs.most == 2


@pytest.fixture
def listed_in(tmp_path) -> Callable[[str], OnDemand]:
    """Read the list of a text."""

    def read(text: str) -> OnDemand:
        path = tmp_path / "models.yaml"
        path.write_text(text)
        return read_on_demand(path)

    return read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {a: 70b --nope}", "a: `hpc-serve submit 70b --nope` would fail: No such option"),
        ("gpus: 2\nmodels: {a: 70b --gpu h100}", "a takes 4 GPUs, and `gpus` allows 2"),
        ("models: {a: 8b --name b}", "leave out --name"),
        ("models: {a: 8b --wait}", "leave out --wait"),
        ("services: x", "must be a whole number"),
        ("services: 0\nmodels: {a: 8b}", "services allows no model to start"),
        ("gpu_hours_a_day: 0\nmodels: {a: 8b}", "gpu_hours_a_day allows no model to start"),
        ("models:\n  a: 8b\n  a: 70b", "models has a name twice"),
        ("[", "models.yaml is not YAML"),
        ("", "lists no models"),
    ],
)
def test_a_list_that_could_not_be_started_is_refused_at_once(listed_in, text, said):
    with pytest.raises(SiteFileError, match=r"models\.yaml") as caught:
        listed_in(text)
    assert said in str(caught.value)


def test_a_bound_without_a_number_is_none(listed_in):
    assert listed_in("gpus:\nmodels: {a: 8b --gpu h100}").most_gpus == math.inf


def test_a_list_says_what_each_model_takes(listed_in):
    found = listed_in("services: 2\nmodels:\n  big: 70b --gpu h100\n  small: 8b --gpu h100 -- --max-num-seqs 4\n")
    assert (found.most_services, {name: one.gpus for name, one in found.models.items()}) == (2, {"big": 4, "small": 1})
    assert found.models["small"].words == ("--name", "small", "8b", "--gpu", "h100", "--", "--max-num-seqs", "4")


def test_a_listed_model_may_be_on_several_kinds_of_machine(listed_in, tmp_path, monkeypatch):
    (tmp_path / "site.yaml").write_text("machines: {a100: {gpu: a100-80gb}, l40s: {gpu: l40s}}\n")
    monkeypatch.setenv("HPC_SERVE_SITE", str(tmp_path / "site.yaml"))
    assert listed_in("models:\n  small: 8b --replicas a100:1,l40s:2\n").models["small"].gpus == 3


def test_an_unknown_model_is_refused_with_those_that_would_be_started(jobs, gateway):
    answer = gateway(on_demand=listed(), wait_s=60.0).complete("d")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "a (started on demand); b (started on demand)" in answer.json["error"]["message"]


@pytest.fixture
def seen(monkeypatch) -> list[Any]:
    """When each decision was made, and what it knew of the listed services that run."""
    seen: list[Any] = []

    def decide_and_note(service: str, now_s: float, waited_s: float, there: Any, *bounds: Any) -> Any:
        seen.append((now_s, {name: replace(one) for name, one in there.items()}))
        return decide(service, now_s, waited_s, there, *bounds)

    monkeypatch.setattr(on_demand, "decide", decide_and_note)
    return seen


def test_a_service_counts_as_ready_since_it_was(jobs, gateway, seen, monkeypatch):
    monkeypatch.setattr(directory, "LOOK_S", 0.2)
    jobs.load_s = 1.0
    front = gateway(on_demand=listed(most_services=1), wait_s=120.0)
    assert front.complete("a").status == 200
    time.sleep(3.0)
    seen.clear()
    assert front.complete("b").status == 200
    now_s, there = seen[0]
    assert now_s - there["a"].ready_at_s > 2.0
    assert there["a"].ready_at_s > there["a"].begun_at_s


def test_a_service_that_somebody_stops_comes_back_for_who_asks(jobs, gateway):
    front = gateway(on_demand=listed(), wait_s=60.0)
    assert front.complete("a").status == 200
    jobs.run(["stop", "a"], jobs.services["a"].store.home)
    with ThreadPoolExecutor(4) as threads:
        assert [answer.status for answer in threads.map(front.complete, ["a"] * 4)] == [200] * 4
    assert jobs.lines == ["submit a", "stop a", "submit a"]


def test_a_listed_service_may_be_named_beside_the_list(jobs, gateway):
    front = gateway(services=("a",), on_demand=listed(), wait_s=60.0)
    assert front.complete("a").status == 200


def test_a_service_is_started_for_who_does_not_wait(service, monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(on_demand, "run_command", lambda words, home: begun.set())

    async def ask() -> None:
        looks = Looks(service.store, wait_s=0.01, look_s=0.1)
        with pytest.raises(Refusal):
            await looks.models.bring("a", 0.0)
        assert await asyncio.to_thread(begun.wait, 10)
        looks.models.close()

    asyncio.run(ask())


def test_a_service_that_is_asked_by_its_models_name_is_asked(jobs, gateway, seen):
    jobs.run(["submit", "a"], jobs.services["a"].store.home)
    front = gateway(on_demand=listed(most_services=1), wait_s=60.0)
    wait_for(lambda: front.complete("405b").status == 200, 60, what="the model")
    assert front.complete("b").status == 200
    now_s, there = seen[0]
    assert now_s - there["a"].asked_at_s < 60


def test_a_look_that_must_be_new_does_not_count_on_one_that_had_begun(service):
    reads, goes_on = [], threading.Event()

    class SlowStore(type(service.store)):  # type: ignore[misc]
        def services(self) -> Any:
            reads.append("begun")
            goes_on.wait(60)
            return super().services()

    async def look_twice() -> None:
        looks = directory.Directory(SlowStore(service.store.home), Settings(), lambda name: None)
        first = asyncio.create_task(looks.look())
        await asyncio.to_thread(wait_for, lambda: reads, 60, what="the first look")
        second = asyncio.create_task(looks.look(older_than_s=0.0))
        await asyncio.sleep(0.1)
        goes_on.set()
        await asyncio.gather(first, second)

    asyncio.run(look_twice())
    assert len(reads) == 2
