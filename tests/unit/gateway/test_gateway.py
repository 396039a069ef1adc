"""Requests through a gateway to stub engines: where they go, what comes back, and what becomes of those that cannot."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hpc_serve.client.connections.engine_pool import LIMITS
from hpc_serve.client.discovery import discovery
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests import attempt, exchange
from hpc_serve.errors import StoreError
from hpc_serve.rendezvous.claims import change_wanted
from hpc_serve.rendezvous.record import Adapter
from hpc_serve.rendezvous.store import EntryFiles, ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from hpc_serve.trust.connection import pinned_context
from tests.cluster import wait_for
from tests.support.stubs import StubService, make_submitted
from tests.unit.client.conftest import opened, work_log
from tests.unit.client.test_wake import asleep, slurm, when_submitted
from tests.unit.gateway.conftest import ANSWER, ASKED, GREEDY, Front
from tests.unit.gateway.test_http_parts import form

assert all((opened, work_log, asleep, slurm))  # fixtures

JSON = {"Content-Type": "application/json"}
KEY = "k" * 32
MODEL = "meta-llama/Llama-3.1-405B-Instruct"
MORTAL = (*GREEDY, "--stub-die-at-request", "1")
SQL = {"sql": Adapter(path="/a", added_at=1.0)}


@pytest.fixture
def other(service: StubService) -> StubService:
    """A second service in the same home."""
    return other_service(service)


@pytest.fixture
def looks_often(monkeypatch) -> None:
    pytest.importorskip("prometheus_client", reason="the gateway needs it")
    monkeypatch.setattr("hpc_serve.gateway.directory.LOOK_S", 0.1)


def other_service(service: StubService, model: str = "tiny-model") -> StubService:
    other = StubService(service.store.home, "tiny")
    other.start("--served-model-name", model, *GREEDY, job_id="300", model=model, served_model_names=(model,))
    service.engines.append(other.engines[0])  # ends with the first service
    return other


def sdk(front: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{front.port}/v1", api_key="none", max_retries=0)


def events(data: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]


def text_of(data: bytes) -> str:
    return "".join(choice["text"] for event in events(data) for choice in event.get("choices", ()))


def wait_for_service(front: Front, model: str, wanted: str) -> None:
    wait_for(
        lambda: front.complete(model).headers.get("x-hpc-serve-service") == wanted, 60, what=f"{model} of {wanted}"
    )


def wait_for_status(front: Front, model: str, wanted: int) -> None:
    wait_for(lambda: front.complete(model).status == wanted, 60, what=f"HTTP {wanted} for {model}")


def wait_for_metric(front: Front, name: str, wanted: float, **labels: str) -> None:
    wait_for(lambda: front.metric(name, **labels) == wanted, 60, what=f"{name} {wanted}")


# -- where requests go


def test_a_request_goes_to_the_service_that_it_names(service, engine, other, gateway):
    front = gateway()
    for model, place in (("405b", 0), (MODEL, 0), ("tiny-model", 1), ("tiny", 1)):
        answer = front.complete(model)
        assert answer.status == 200, answer.body
        assert answer.headers["x-stub-engine"] == str(service.engines[place].port)
        assert answer.json["choices"][0]["text"] == ANSWER
    assert answer.headers["x-hpc-serve-service"] == "tiny"
    assert answer.headers["x-hpc-serve-replica"] == "300-r0-0"


def test_an_adapter_has_a_name_of_its_own_as_soon_as_a_record_has_it(service, engine, front):
    assert front.complete("sql").code == "model_not_found"
    service.publish(engine, counter=2, adapters=SQL)
    answer = front.complete("sql")
    assert answer.json["error"]["message"].startswith("The model `sql` does not exist")  # it has reached the engine
    refused = front.ask("POST", "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/a"})
    assert refused.status == 404
    assert "hpc-serve adapter add" in refused.json["error"]["message"]


def test_an_adapter_of_a_service_that_starts_is_waited_for_as_its_model_is(service, gateway):
    engine = service.start(*GREEDY, state="starting")
    change_wanted(service.store, "405b", lambda found: Wanted(least=1, most=1, count=1, adapters=SQL))
    front = gateway()
    assert front.complete("sql").code == front.complete("405b").code == "no_replica"
    service.publish(engine, counter=2, adapters=SQL)
    wait_for_status(front, "sql", 404)


def test_an_adapter_that_has_moved_to_another_service_is_asked_there(looks_often, service, engine, other, gateway):
    front = gateway()
    service.publish(engine, counter=2, adapters=SQL)
    wait_for_service(front, "sql", "405b")
    service.publish(engine, counter=3, adapters={})
    other.publish(other.engines[0], counter=2, adapters=SQL)
    wait_for_service(front, "sql", "tiny")


def test_deep_json_is_for_an_engine_to_refuse_where_replicas_have_other_adapters(service, engine, gateway):
    service.publish(service.start(*GREEDY), counter=2, adapters=SQL)
    assert gateway().ask("POST", "/v1/completions", b'{"prompt": ' + b"[" * 100_000).status == 400


@pytest.mark.parametrize(
    ("place", "told"),
    [((ServiceStore, "services"), "too many files"), ((EntryFiles, "read_all"), "405b cannot be read")],
)
def test_while_no_service_could_be_read_none_is_called_missing(engine, gateway, monkeypatch, place, told):
    def fail(self: Any) -> Any:
        raise StoreError("too many files")

    with monkeypatch.context() as broken:
        broken.setattr(*place, fail)
        front = gateway()
        answer = front.complete()
        answer.check_refusal(503, "no_replica", told)
        assert answer.headers["retry-after"]
    wait_for_status(front, "405b", 200)


def test_an_unknown_model_is_refused_with_what_there_is(front):
    answer = front.complete("gpt-\x1b[2J")
    answer.check_refusal(404, "model_not_found", f"405b (ready): {MODEL}")
    assert b"\x1b" not in answer.body
    with pytest.raises(openai.NotFoundError, match="405b"):
        sdk(front).completions.create(model="gpt", prompt="x")


def test_without_a_model_the_only_service_is_meant(service, front):
    assert front.complete(None).json["choices"][0]["text"] == ANSWER
    assert front.ask("POST", "/v1/embeddings", b"no json").headers["x-hpc-serve-service"] == "405b"
    other_service(service)
    wait_for_status(front, "tiny", 200)
    front.complete(None).check_refusal(400, "model_required", "405b, tiny")


def test_a_model_of_two_services_is_ambiguous_until_one_ends(looks_often, service, engine, gateway):
    other = other_service(service, MODEL)
    front = gateway()
    front.complete(MODEL).check_refusal(400, "ambiguous_model")
    assert front.complete("tiny").status == 200
    other.publish(other.engines[0], job_id="300", state="stopped")
    wait_for_status(front, MODEL, 200)


def test_a_form_is_routed_by_its_field(engine, other, gateway):
    body = form(("name=model", b"tiny"), ('name="file"', b"\x00" * 1000))
    kind = "multipart/form-data; boundary=XyZ"
    answer = gateway().ask("POST", "/v1/audio/transcriptions", body, Content_Type=kind)
    assert answer.headers["x-hpc-serve-service"] == "tiny"


def test_only_the_services_that_were_named_are_served(engine, other, gateway):
    front = gateway(services=("tiny",))
    assert (front.complete("tiny").status, front.complete("405b").status) == (200, 404)


def test_services_come_and_go_without_a_restart(looks_often, service, gateway):
    front = gateway()
    assert front.complete("405b").status == 404
    assert front.ask("GET", "/v1/models").json["data"] == []
    engine = service.start(*GREEDY)
    wait_for_status(front, "405b", 200)
    wait_for_metric(front, "in_flight", 0, service="405b")
    service.publish(engine, state="stopped")
    wait_for_status(front, "405b", 404)
    wait_for(lambda: 'in_flight{service="405b"' not in front.ask("GET", "/metrics").body.decode(), 60, what="its watch")


def test_services_stay_while_the_home_is_away(looks_often, service, front):
    assert front.complete().status == 200
    home = service.store.home
    home.rename(home.with_name("away"))
    for _ in range(20):
        assert front.complete().status == 200
        assert front.complete("unknown").status == 404  # looks again, at most each second
    home.with_name("away").rename(home)


# -- models


def test_models_are_those_of_ready_engines_and_the_names_of_services(service, engine, other, gateway):
    service.store.write_submitted(make_submitted(service="waiting"))
    front = gateway()
    listed = {model["id"]: model for model in front.ask("GET", "/v1/models").json["data"]}
    assert set(listed) == {"405b", MODEL, "tiny", "tiny-model"}
    assert listed["tiny"]["root"] == "tiny-model"
    assert listed["tiny"]["max_model_len"] == 100_000
    assert front.ask("GET", "/v1/models/tiny-model").json["service"] == "tiny"
    assert front.ask("GET", f"/v1/models/{MODEL}").status == 200
    assert front.ask("GET", "/v1/models/other").status == 404


def test_an_adapter_that_no_record_names_is_found(service, other, gateway):
    service.start("--served-model-name", "base", "my-adapter", *GREEDY, served_model_names=("base",))
    assert gateway().complete("my-adapter").status == 200


# -- answers as they are


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_passed_on_byte_for_byte(service, engine, front, stream):
    asked = {**ASKED, "stream": stream, "return_token_ids": True}
    key = {"Authorization": f"Bearer {service.key_file.read_text().strip()}"}
    url = f"https://127.0.0.1:{engine.port}/v1/completions"
    direct = http.post(url, json=asked, headers=key, verify=pinned_context(engine.certificate)).content
    assert len(direct) > 100
    bare = [re.sub(rb'"id": "stub-\d+", "created": \d+', b"", one) for one in (direct, front.complete(**asked).body)]
    assert bare[0] == bare[1]


def test_events_come_one_by_one(hanging, gateway):
    hang = hanging("--stub-hang-after", "3")
    connection, response = gateway().stream()
    first = b""
    while first.count(b"data: {") < 3:  # they come while the engine makes no other
        first += response.read1()
    assert first.startswith(b"data: {")
    assert first.count(b"data: ") == 3
    hang.unlink()
    assert text_of(first + response.read()) == ANSWER
    connection.close()


@pytest.mark.parametrize("asks", [False, True])
def test_signs_of_the_engine_reach_a_client_that_asks_for_them(service, gateway, asks):
    service.start(*GREEDY, "--stub-word-s", "1.2")
    body = {**ASKED, "max_tokens": 3, "stream": True}
    answer = gateway().ask("POST", "/v1/completions", body, **({"X-HPC-Serve-Signs": "1"} if asks else {}))
    assert answer.body.count(b"data: {") == 3
    assert bool(answer.body.count(b"\n\n:\n\n")) is asks


def test_streams_whose_clients_leave_at_their_last_event_take_one_connection(front, opened, monkeypatch):
    """OpenAI's SDK leaves there. The gateway's own connection to the engine serves the next request all the same."""
    monkeypatch.setattr(attempt, "END_S", 60.0)
    monkeypatch.setitem(LIMITS, "keepalive_expiry", 600.0)
    for _ in range(4):
        chunks = list(sdk(front).completions.create(**ASKED, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER
        wait_for_metric(front, "in_flight", 0)
    assert len(opened) == 1


def test_an_error_of_the_engine_is_passed_on(service, gateway):
    service.start("--stub-error", "422")
    answer = gateway().complete()
    assert (answer.status, answer.json["error"]["message"]) == (422, "a stubbed error")


# -- engines that are lost


def test_a_stream_goes_on_at_another_replica(service, gateway, monkeypatch):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 60.0)  # until the other one has begun, however long that takes
    service.start(*MORTAL, "--stub-word-s", "0.05")
    front = gateway()
    connection, response = front.stream()
    begun = response.read1()
    service.start(*GREEDY)
    data = begun + response.read()
    assert text_of(data) == ANSWER
    assert data.endswith(b"data: [DONE]\n\n")
    (mark,) = [event["resumed"] for event in events(data) if "resumed" in event]
    assert (mark["exact"], mark["replica"]) == (True, "101-r0-0.json")
    wait_for_metric(front, "requests_total", 1, service="405b")
    assert front.metric("resumed_total", service="405b") == 1
    connection.close()


def test_a_request_is_repeated_at_another_replica(service, gateway):
    service.start(*MORTAL)
    service.start(*GREEDY)
    front = gateway()
    answers = [front.complete() for _ in range(8)]
    while service.engines[0].process.poll() is None:  # chance decides who is asked first
        answers.append(front.complete())
    assert {answer.json["choices"][0]["text"] for answer in answers} == {ANSWER}
    assert service.engines[0].process.wait() == 1
    wait_for(lambda: front.metric("repeated_total", service="405b") >= 1, 60, what="the repetition's count")


def test_a_stream_that_cannot_go_on_ends_with_an_error_event(service, gateway, monkeypatch):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.2)
    service.start(*MORTAL)
    front = gateway()
    connection, response = front.stream()
    data = response.read()
    assert response.status == 200
    *_, last = events(data)
    assert last["error"]["code"] == "stream_broken"
    assert "cannot go on at another replica" in last["error"]["message"]
    assert b"[DONE]" not in data
    assert ANSWER.startswith(text_of(data))
    wait_for_metric(front, "broken_streams_total", 1, service="405b")
    connection.close()


def test_without_a_replica_it_waits_and_then_says_how_the_service_is(service, gateway):
    service.start(*GREEDY, state="starting", stage="loading weights")
    answer = gateway(wait_s=0.3).complete()
    answer.check_refusal(503, "no_replica", "loading weights")
    assert int(answer.headers["retry-after"]) > 0


def test_a_request_that_waits_is_answered_once_a_replica_is_ready(service, gateway, monkeypatch):
    monkeypatch.setattr(discovery, "REFRESH_S", 0.2)
    engine = service.start(*GREEDY, state="starting")
    front = gateway(wait_s=180.0)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(front.complete) for _ in range(3)]
        wait_for_metric(front, "queued", 3, service="405b")
        service.publish(engine, counter=2)
    assert [one.result().status for one in asked] == [200, 200, 200]


def test_a_service_that_is_asleep_is_there_and_the_answer_says_how_to_wake_it(asleep, slurm, gateway):
    front = gateway()
    for model in ("405b", MODEL):
        front.complete(model).check_refusal(503, "no_replica", "405b is asleep")
    assert front.ask("GET", "/v1/models").json["data"] == []
    assert "405b (asleep)" in front.complete("other").json["error"]["message"]
    assert len(slurm.scripts) == 0


def test_a_request_wakes_a_service(asleep, slurm, gateway):
    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))
    assert gateway(wake=True, wait_s=120.0).complete().status == 200
    assert len(slurm.scripts) == 1


# -- limits


def test_over_the_limit_it_says_when_to_try_again(hanging, gateway):
    hang = hanging()
    front = gateway(max_in_flight=2, most_queued=1, wait_s=120.0)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(front.complete) for _ in range(3)]
        wait_for(lambda: front.metric("in_flight") == 2 and front.metric("queued") == 1, 60, what="the requests")
        answer = front.complete()
        hang.unlink()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "queue_full", "1")
    assert "3 requests through this gateway: at most 2 may be under way, and 1 may wait" in answer.body.decode()
    assert [one.result().status for one in asked] == [200, 200, 200]
    assert front.complete().status == 200
    wait_for_metric(front, "requests_total", 1, status="429", service="405b", route="/v1/completions")


def test_the_engine_says_what_it_takes_and_the_gateway_passes_that_on(front):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):  # as curl sends a body without a word
        refused = front.complete(content_type=kind)
        assert refused.status == 400
        assert "Only 'application/json' is allowed" in refused.json["error"]["message"]


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_over_the_limit_is_refused(engine, gateway, is_announced):
    front = gateway(most_body_bytes=10_000)
    body = json.dumps({"model": "405b", "prompt": "x" * 20_000}).encode()
    connection = front.open()
    content = body if is_announced else iter([body[:9_000], body[9_000:]])
    connection.request("POST", "/v1/completions", content, JSON)
    assert connection.getresponse().status == 413
    connection.close()
    assert front.complete().status == 200


def test_bodies_that_are_held_are_bounded_and_given_back(hanging, gateway):
    hang = hanging()
    front = gateway(most_held_bytes=10_000)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(front.complete, user="x" * 8_000)
        wait_for_metric(front, "in_flight", 1)
        assert front.complete(user="x" * 8_000).code == "memory_full"
        hang.unlink()
    assert asked.result().status == 200
    wait_for(lambda: front.complete(user="x" * 8_000).status == 200, 60, what="the memory of the request that ended")


def test_a_client_that_leaves_ends_its_request_at_the_engine(hanging, gateway, work_log):
    hanging(*work_log.flags)
    front = gateway()

    def wait_for_event(kind: str, count: int) -> None:
        wait_for(lambda: work_log.count(kind) == count, 60, what=f"{kind} at the engine")

    for number, is_stream in enumerate((True, False), start=1):
        connection = front.open()
        connection.request("POST", "/v1/completions", json.dumps({**ASKED, "stream": is_stream}), JSON)
        wait_for_event("begun", number)
        connection.close()
        wait_for_event("abort", number)
    wait_for_metric(front, "in_flight", 0)
    wait_for_metric(front, "requests_total", 2, status="499")


# -- who may ask


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/nothing"])
def test_the_key_is_asked_for_on_every_route_but_health(engine, gateway, path):
    front = gateway(key=KEY)
    assert front.ask("GET", "/health").json == {"status": "ok"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}, {"X_Api_Key": KEY[:-1]}):
        answer = front.ask("GET", path, **headers)
        answer.check_refusal(401, "invalid_api_key")
        assert ("does not know the key that was sent" in answer.json["error"]["message"]) == bool(headers)
        assert front.ask("POST", "/v1/completions", ASKED, **headers).status == 401
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"X_Api_Key": KEY}):
        assert front.ask("GET", path, **headers).status != 401
        assert front.ask("POST", "/v1/completions", ASKED, **headers).status == 200


def test_pages_of_other_origins_are_refused(front, gateway):
    open_front = gateway(origins=("http://localhost:3000",))
    assert front.ask("POST", "/v1/completions", ASKED, Origin="http://evil.example").code == "origin_not_allowed"
    assert front.ask("GET", "/v1/models", Origin="null").status == 403
    assert open_front.ask("GET", "/v1/models", Origin="http://evil.example").status == 403
    answer = open_front.ask("POST", "/v1/completions", ASKED, Origin="http://localhost:3000")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    preflight = {"Origin": "http://localhost:3000", "Access_Control_Request_Method": "POST"}
    asking = {**preflight, "Access_Control_Request_Headers": "authorization,content-type"}
    assert open_front.ask("OPTIONS", "/v1/completions", **asking).status == 200


def test_metrics_count_requests_by_service_route_and_status(front):
    front.complete()
    front.complete("nothing")
    front.ask("POST", "/sleep", {})
    wait_for_metric(front, "requests_total", 3)  # an answer comes before its count
    assert front.metric("requests_total", service="405b", route="/v1/completions", status="200") == 1
    assert front.metric("requests_total", service="", route="/v1/completions", status="404") == 1
    assert front.metric("requests_total", service="", route="other", status="404") == 1
    assert front.metric("sent_bytes_total", service="405b") > 100
    assert front.metric("received_bytes_total", service="405b") > 20
    assert front.metric("wait_seconds_count", service="405b") == 1


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/v1/completions"])
def test_a_page_whose_name_was_resolved_to_this_host_reads_nothing(engine, gateway, path):
    """DNS rebinding: the browser takes the page and the gateway for one origin, and sends no Origin with a GET."""
    front = gateway(hosts=("chat.site.example",))
    for host in ("evil.example", f"evil.example:{front.port}", "localhost.evil.example", "0.0.0.0", "gateway", "["):
        front.ask("GET", path, Host=host).check_refusal(421, "host_not_allowed")
    for host in ("localhost", f"LOCALHOST:{front.port}", f"127.0.0.2:{front.port}", "[::1]:8000", "chat.site.example"):
        assert front.ask("GET", path, Host=host).status != 421
    assert gateway(hosts=None).ask("GET", path, Host="node-1.site.example").status != 421  # over TLS


def test_the_gateway_has_a_page_that_may_ask_it_and_no_other(engine, gateway):
    front = gateway(key=KEY)
    page = front.ask("GET", "/")
    assert page.status == 200
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert b"connect-src &#39;self&#39;" in page.body
    assert KEY.encode() not in page.body
    own, key = f"http://127.0.0.1:{front.port}", {"Authorization": f"Bearer {KEY}"}
    assert front.ask("POST", "/v1/completions", ASKED, Origin=own, **key).status == 200
    assert front.ask("POST", "/v1/completions", ASKED, Origin=own).status == 401
    for other in (f"https://127.0.0.1:{front.port}", f"http://127.0.0.1:{front.port + 1}", "http://127.0.0.1"):
        assert front.ask("POST", "/v1/completions", ASKED, Origin=other, **key).code == "origin_not_allowed"
    assert front.ask("GET", "/v1/models", Origin="http://evil.example", Host="evil.example", **key).status == 421


@pytest.mark.parametrize(
    ("path", "headers", "is_known"),
    [
        (b"/health", [], False),
        (b"/", [], False),
        (b"/v1/models", [(b"authorization", b"Bearer " + KEY.encode())], True),
    ],
)
def test_only_who_shows_the_key_is_out_of_a_strangers_limits(service, extra, path, headers, is_known):
    from hpc_serve.gateway.app import Gateway
    from hpc_serve.gateway.request import Request
    from hpc_serve.gateway.settings import Settings

    shown: list[bool] = []
    connection: Any = SimpleNamespace(show_key=lambda: shown.append(True))
    request = Request(connection, "GET", path, [(b"host", b"localhost"), *headers])
    Gateway(service.store, Settings(key=KEY)).let_in(request)
    assert shown == [True] * is_known
