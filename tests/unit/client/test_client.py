"""The client against real processes, sockets and files: stub engines, and records that the store wrote."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import traceback
from typing import Any

import openai
import pytest

from hpc_serve.client import connect, connect_async, endpoint, services
from hpc_serve.client.discovery import discovery
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.probe import LeaseWatch, probe, probe_record, probe_records
from hpc_serve.errors import (
    AmbiguousServiceError,
    InvalidRequestError,
    RecordError,
    ServiceNotFoundError,
    StreamBrokenError,
    WaitTimeoutError,
)
from hpc_serve.trust.connection import Identity
from tests.support.patience import connect_to_all, wait_until
from tests.support.stubs import make_record
from tests.unit.client.conftest import HELLO, MODEL, FakeClock, one_engine, say, watch_told


@pytest.fixture(autouse=True)
def astray(monkeypatch):
    """An environment with everything in it that could lead a client astray."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer sk-of-openai")


# Talking


def test_a_client_needs_no_name_when_one_service_is_live(service):
    engine = service.start()
    client = connect()
    assert isinstance(client, openai.OpenAI)
    assert (client.service, client.model) == ("405b", MODEL)
    assert say(client) == engine.port
    assert str(client.base_url) == f"https://127.0.0.1:{engine.port}/v1/"


def test_everything_the_sdk_does_works(service):
    service.start()
    client = connect("405b")
    stream = client.chat.completions.create(model=client.model, messages=HELLO, stream=True)
    words = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert words[1:] == [" word"] * 3
    assert client.completions.create(model="405b", prompt="x").choices[0].text.startswith("stub-")
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    answer: Any = client.chat.completions.create(model=client.model, messages=HELLO, tools=tools)
    call = answer.choices[0].message
    assert call.tool_calls[0].function.name == "weather"
    raw = client.chat.completions.with_raw_response.create(model=client.model, messages=HELLO)
    assert raw.headers["x-stub-engine"] == str(service.engines[0].port)
    assert raw.parse().choices
    with client.chat.completions.with_streaming_response.create(model=client.model, messages=HELLO) as streamed:
        assert json.loads(streamed.read())["choices"]
    assert [model.id for model in client.models.list()] == [MODEL, "405b"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="405b has no /v1/rerank: its model is of another kind"):
        client.post("/rerank", body={"model": client.model}, cast_to=object)


@pytest.mark.anyio
async def test_an_async_client_does_the_same(service):
    service.start()
    async with await connect_async() as client:
        assert isinstance(client, openai.AsyncOpenAI)
        assert client.service == "405b"
        asked = client.with_options(timeout=5).chat.completions
        stream = await asked.create(model=client.model, messages=HELLO, stream=True)
        assert len([chunk async for chunk in stream if chunk.choices]) == 4
        raw = await client.chat.completions.with_raw_response.create(model=client.model, messages=HELLO)
        assert raw.parse().choices


def test_copies_stay_clients_of_the_service(service):
    engine = service.start()
    client = connect("405b", timeout=7, max_retries=1, default_headers={"X-Test": "1"})
    copy = client.with_options(max_retries=0).copy(timeout=5)
    assert type(copy) is type(client)
    assert (copy.service, copy.model, copy.max_retries, copy.timeout) == ("405b", MODEL, 0, 5)
    assert client.timeout == 7
    assert say(copy) == engine.port


def test_requests_go_to_the_least_loaded(service):
    slow, fast = service.start("--stub-word-s", "30"), service.start()
    client = connect_to_all(service, 2)
    streams = []
    while True:  # until a stream of ours keeps the slow one busy
        stream = client.chat.completions.create(model=client.model, messages=HELLO, stream=True)
        first = next(iter(stream)).choices[0].delta.content
        streams.append(stream)
        if first == f"stub-{slow.port}":
            break
    for stream in streams[:-1]:
        stream.close()
    assert {say(client) for _ in range(8)} == {fast.port}
    streams[-1].close()
    assert client._watch.pool._under_way == {}


# Failing over


def test_the_next_replica_gets_the_request_that_a_draining_one_turned_away(service, asker):
    draining, other = service.start(), service.start()
    client = asker(max_retries=0)
    draining.drain_file.touch()
    assert {client.say() for _ in range(10)} == {other.port}
    assert asker().say() == other.port, "a new client does not go there at all"


def test_a_stream_under_way_outlives_the_drain(service):
    engine = service.start("--stub-word-s", "0.05", "--stub-words", "8")
    client = connect("405b")
    stream = iter(client.chat.completions.create(model=client.model, messages=HELLO, stream=True))
    next(stream)
    engine.drain_file.touch()
    assert len([chunk for chunk in stream if chunk.choices]) == 7


def test_a_request_to_an_engine_that_is_being_stopped_goes_elsewhere(service):
    leaving, other = service.start("--stub-error", "500"), service.start()
    client = connect("405b", max_retries=0)
    service.publish(leaving, state="draining", counter=2)
    assert {say(client) for _ in range(6)} == {other.port}


def test_an_error_that_may_be_the_requests_own_is_not_taken_to_the_next(service):
    service.start("--stub-error", "500")
    _, client = one_engine(service, "--stub-error", "500")
    with pytest.raises(openai.InternalServerError, match="a stubbed error"):
        say(client)


def test_the_sdks_retries_try_another_replica(service):
    broken, well = service.start("--stub-error", "500"), service.start()
    client = connect_to_all(service, 2, max_retries=1)
    assert {say(client) for _ in range(4)} == {well.port}
    assert broken.process.poll() is None


def test_a_request_lost_on_the_way_is_repeated_at_another_replica(service):
    mortal, other = service.start("--stub-die-at-request", "1"), service.start()
    client = connect_to_all(service, 2, max_retries=0)
    wait_until(lambda: [say(client), mortal.process.poll()] != [other.port, None])  # chance decides who is asked first
    assert {say(client) for _ in range(10)} == {other.port}
    assert mortal.process.wait() == 1


def test_a_stream_that_breaks_says_so_and_the_next_one_goes_elsewhere(service):
    mortal, client = one_engine(service, "--stub-die-at-request", "1")
    other = service.start()
    stream = client.chat.completions.create(model=client.model, messages=HELLO, stream=True)
    with pytest.raises(StreamBrokenError, match="the engine sent no token ids") as broken:
        list(stream)
    assert broken.value.text == f"stub-{mortal.port} word word"
    assert len(broken.value.chunks) == 3
    assert mortal.process.wait() == 1
    assert say(client) == other.port
    assert client._watch.pool._under_way == {}


@pytest.mark.anyio
async def test_an_async_request_that_is_cancelled_is_given_back(service, work_log):
    service.start("--stub-first-s", "30", *work_log.flags)
    client = await connect_async("405b")
    request = asyncio.ensure_future(client.chat.completions.create(model=client.model, messages=HELLO))
    # Not while it connects: there anyio loses a cancellation under Python 3.10, at times.
    await asyncio.to_thread(wait_until, lambda: work_log.count("begun"))
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert client._watch.pool._under_way == {}
    assert len(client._watch.pool) == 1, "it is not the replica's fault"


def test_a_replica_that_comes_later_is_found_and_one_that_says_it_drains_is_left(service, monkeypatch):
    monkeypatch.setattr(discovery, "REFRESH_S", 0.0)
    leaving = service.start()
    client = connect("405b")
    later = service.start()
    wait_until(lambda: say(client) == later.port)
    service.publish(leaving, state="draining", counter=2)
    wait_until(lambda: say(client) and len(client._watch.pool) == 1)
    assert {say(client) for _ in range(6)} == {later.port}


def test_when_all_are_gone_it_says_why(service):
    engine, client = one_engine(service)
    engine.kill()
    with pytest.raises(ServiceNotFoundError, match=rf"no answer from 127\.0\.0\.1:{engine.port}"):
        say(client)
    service.publish(engine, state="failed", failed_part="engine", reason="engine exited with -9", counter=2)
    with pytest.raises(ServiceNotFoundError, match=r"405b is failed: engine exited with -9 \(job 100\)"):
        say(client)
    with pytest.raises(ServiceNotFoundError, match="failed: engine exited with -9"):
        asyncio.run(connect_async("405b"))
    service.start()
    assert say(client) == service.engines[-1].port


def test_a_streamed_upload_is_not_sent_twice(service):
    engine, client = one_engine(service)
    engine.drain_file.touch()
    with pytest.raises(openai.APIStatusError) as refusal:
        client.post("/files", cast_to=object, content=iter([b"once"]))
    assert refusal.value.status_code == 503, "the body is gone: it cannot be taken elsewhere"


# Waiting


def test_a_client_waits_for_what_is_coming(service):
    engine = service.start(state="starting", stage="loading weights")
    with pytest.raises(ServiceNotFoundError, match=r"405b is starting: loading weights \(job 100\)\. Wait for it"):
        connect("405b")
    published = threading.Timer(0.3, lambda: service.publish(engine, counter=2))
    published.start()
    assert say(connect("405b", wait=60)) == engine.port
    published.join()


@pytest.mark.anyio
async def test_an_async_client_waits_without_blocking_the_loop(service):
    engine = service.start(state="starting", stage="loading weights")
    connecting = asyncio.ensure_future(connect_async("405b", wait=True))
    await asyncio.sleep(0.2)
    assert not connecting.done()
    service.publish(engine, counter=2)
    assert (await asyncio.wait_for(connecting, 60)).service == "405b"


def test_a_request_waits_for_the_successor(service):
    first = service.start()
    client = connect("405b", wait=60, max_retries=0)
    first.kill()
    service.publish(first, state="stopped", counter=2)
    second = service.start(state="starting", stage="loading weights")
    published = threading.Timer(0.3, lambda: service.publish(second, counter=2))
    published.start()
    assert say(client) == second.port
    published.join()


# Choosing


def test_several_services_need_a_name(services_of):
    for name in ("405b", "8b"):
        services_of(name).start()
    with pytest.raises(AmbiguousServiceError, match=r"name one:\n  405b: ready\n  8b: ready"):
        connect()
    assert connect("8b").service == "8b"
    assert endpoint("8b").service == "8b"


def test_the_one_that_is_live_is_meant_among_others(services_of):
    services_of("8b").start(state="failed", reason="CUDA out of memory", failed_part="engine")
    services_of("70b").start(state="starting", stage="waiting for Ray nodes")
    with pytest.raises(ServiceNotFoundError, match="No service is ready") as refusal:
        connect()
    assert "  70b: starting: waiting for Ray nodes (job 100)\n  8b: failed: engine: CUDA" in str(refusal.value)
    with pytest.raises(WaitTimeoutError, match="70b was not ready"):
        connect(wait=0.1)
    services_of("405b").start()
    assert connect().service == "405b"


def test_none_at_all_is_said_plainly(services_of, tmp_path):
    with pytest.raises(ServiceNotFoundError, match=r"There is no service in .*home.*hpc-serve submit"):
        connect()
    with pytest.raises(ServiceNotFoundError, match="No service '405b' in"):
        connect("405b")
    with pytest.raises(InvalidRequestError, match="cannot name a service"):
        connect("../405b")
    assert services() == ()
    assert not (tmp_path / "home").exists(), "looking makes nothing"


def test_services_are_listed_with_their_state(services_of):
    services_of("405b").start()
    services_of("8b").start(state="stopped")
    assert [(status.service, len(status.ready)) for status in services()] == [("405b", 1), ("8b", 0)]


def test_an_endpoint_is_what_any_tool_needs(service, monkeypatch):
    engine = service.start()
    found = endpoint()
    assert found.base_url == f"https://127.0.0.1:{engine.port}/v1"
    assert found.model == MODEL
    assert "OPENAI" not in "".join(found.trust)
    assert (found.variables["OPENAI_BASE_URL"], found.variables["OPENAI_API_KEY"]) == (found.base_url, found.api_key)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    plain = openai.OpenAI(default_headers={"Authorization": f"Bearer {found.api_key}"})
    assert plain.chat.completions.create(model=found.model, messages=HELLO).choices


# Trust


def test_the_key_is_in_no_text(service, caplog):
    caplog.set_level(logging.DEBUG)
    engine = service.start()
    key = service.store.read_api_key("405b")
    client = connect("405b", max_retries=0)
    say(client)
    texts = [repr(client), repr(client._watch), repr(endpoint("405b")), repr(client._watch.status), caplog.text]
    engine.kill()
    with pytest.raises(ServiceNotFoundError) as gone:
        say(client)
    service.key_file.chmod(0o644)
    with pytest.raises(RecordError) as refused:
        connect("405b")
    texts += [str(gone.value), repr(gone.value.__context__), str(refused.value)]
    assert not [text for text in texts if key in text]
    assert "sk-of-openai" not in caplog.text


def test_the_key_is_in_no_variable_that_a_traceback_shows(service, asker):
    service.start("--stub-first-s", "60")
    with pytest.raises(openai.APITimeoutError) as late:
        asker(max_retries=0, timeout=openai.Timeout(60, read=0.2)).say()
    with pytest.raises(TypeError, match="tiemout") as misspelt:
        asker(tiemout=1)
    for error in (late.value, misspelt.value):
        shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        assert "watch = " in shown or "message = " in shown
        assert service.store.read_api_key("405b") not in shown


def test_an_engine_with_another_key_is_explained(service):
    service.start()
    service.key_file.write_text("a-new-key-0123456789\n")
    with pytest.raises(ServiceNotFoundError, match="has another API key than the service's file"):
        connect("405b")


def test_records_that_cannot_be_trusted_are_passed_over_and_told(service):
    engine = service.start()
    folder = service.store.service_dir("405b")
    (folder / "7-r0-0.json").write_text('{"version": 1, "service": "405b", "mo')
    assert say(connect("405b")) == engine.port
    engine.kill()
    with pytest.raises(ServiceNotFoundError, match=r"Problems:\n.*7-r0-0\.json is not JSON"):
        connect("405b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of somebody else")
def test_a_foreign_record_leads_nobody_away(service):
    mine, foreign = service.start(), service.start()
    os.chown(service.store.service_dir("405b") / "101-r0-0.json", 65534, 65534)
    client = connect("405b")
    assert {say(client) for _ in range(10)} == {mine.port}
    assert foreign.process.poll() is None


def test_a_missing_key_is_explained(service):
    service.start()
    service.key_file.unlink()
    assert "no API key yet" in services()[0].problems[0]


# Liveness


def test_the_first_address_that_answers_is_taken(service):
    engine = service.start()
    key = service.store.read_api_key("405b")
    # 192.0.2.0/24 is for documentation: nobody answers there.
    shown = {"port": engine.port, "certificate": engine.certificate}
    record = make_record(hosts=("192.0.2.1", "127.0.0.1"), **shown)
    assert probe_record(record, key).host == "127.0.0.1"
    both = make_record(hosts=("127.0.0.2", "127.0.0.1"), **shown)
    assert probe_record(both, key).host == "127.0.0.1"
    assert probe_record(make_record(hosts=()), key).status == "no answer"
    assert probe("no such host.invalid", engine.port, Identity.of(record, key)).status == "no answer"


def test_an_engine_that_is_not_well_is_not_offered(service, tmp_path):
    ill = tmp_path / "ill"
    service.start("--stub-unhealthy-file", str(ill))
    assert connect("405b").service == "405b"
    ill.touch()
    with pytest.raises(ServiceNotFoundError, match="is not healthy: /health answers 503"):
        connect("405b")


def test_a_lease_is_judged_by_our_own_clock():
    lease = LeaseWatch()
    record = make_record(counter=1)
    assert lease.age_s(record, 100.0) == 0.0
    assert lease.age_s(record, 120.0) == 20.0
    assert lease.age_s(make_record(counter=2), 125.0) == 0.0
    assert lease.age_s(make_record(counter=2), 126.0) == 1.0


def test_an_engine_is_probed_again_when_its_record_is_not_renewed_or_after_a_while(service):
    record = service.publish(service.start())
    clock = FakeClock()
    asked: list[int] = []

    def ask(records, key):
        asked.extend(record.counter for record in records)
        return probe_records(records, key)

    watch = ServiceWatch(service.store, "405b", probe=ask, clock=clock)
    for seconds, renewed, expected in [(0, False, 1), (20, False, 1), (20, False, 2), (1, True, 2), (70, True, 3)]:
        clock.now_s += seconds
        if renewed:
            record = service.renew(record)
        assert len(watch.refresh().ready) == 1
        assert len(asked) == expected, (seconds, renewed)


def test_what_its_launcher_found_unresponsive_is_not_offered_until_it_answers_again(service):
    """Its API may answer every probe while its engine hangs."""
    hung = service.publish(service.start())
    other = service.publish(service.start())
    watch = ServiceWatch(service.store, "405b")
    assert len(watch.refresh().ready) == 2
    hung = service.renew(hung, state="unresponsive", reason="it hangs")
    watch.refresh()
    assert {watch.pick().name for _ in range(4)} == {other.name}
    service.renew(hung, state="ready")
    assert len(watch.refresh().ready) == 2


def test_a_replica_that_hangs_gets_requests_only_while_no_other_is_ready(service):
    hung, other = service.publish(service.start()), service.publish(service.start(), state="starting")
    clock = FakeClock()
    watch = watch_told(service, {hung.name: "hung", other.name: "ready"}, clock=clock)
    assert not watch.refresh().ready
    assert watch.pick().name == hung.name
    clock.now_s += 5.0
    service.renew(other, state="ready")
    watch.refresh()
    assert {watch.pick().name for _ in range(4)} == {other.name}


def test_the_model_is_a_name_that_all_replicas_serve(service):
    service.start(served_model_names=("/scratch/weights", "405b"))
    service.start(served_model_names=(MODEL, "405b"))
    assert connect_to_all(service, 2).model == "405b"  # `connect` returns with the first that answers


def test_importing_the_client_does_not_import_the_sdk():
    code = "import sys, hpc_serve.client; print({'openai', 'httpx', 'httpx2', 'anyio', 'filelock'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
