"""All ready replicas are told the same, or those that did it are told to take it back; stub engines."""

from __future__ import annotations

import pickle
import threading

import pytest

from hpc_serve.client import connect, tell_all
from hpc_serve.errors import InvalidRequestError, NotAllReplicasError, ServiceNotFoundError
from tests.support.patience import wait_until


@pytest.fixture(autouse=True)
def dev_mode(monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")


def test_all_are_told(service):
    for _ in range(3):
        service.start()
    answers = tell_all("405b", "/pause")
    assert sorted(answers) == ["100-r0-0", "101-r0-0", "102-r0-0"]
    assert {(answer.status, answer.text) for answer in answers.values()} == {(200, '{"status": "paused"}')}

    texts: list[str] = []

    def ask() -> None:
        client = connect("405b")
        texts.append(client.completions.create(model=client.model, prompt="Why?").choices[0].text)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(0.5)
    assert not texts
    tell_all("405b", "/resume")
    wait_until(lambda: texts)


def test_what_one_does_not_do_the_others_take_back(service, monkeypatch):
    service.start()
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    service.start()  # it has no such route
    with pytest.raises(
        NotAllReplicasError, match="1 of 2 replicas of 405b did not do POST /pause: 101-r0-0: 404"
    ) as caught:
        tell_all("405b", "/pause", undo="/resume")
    assert "VLLM_SERVER_DEV_MODE=1`. /resume was sent to those that did it or gave no answer." in str(caught.value)
    assert {name: answer.status for name, answer in caught.value.answers.items()} == {"100-r0-0": 200, "101-r0-0": 404}
    sent = pickle.loads(pickle.dumps(caught.value))  # as a process of multiprocessing or Ray hands it on
    assert (str(sent), sent.answers) == (str(caught.value), caught.value.answers)
    client = connect("405b")
    assert len([client.completions.create(model=client.model, prompt="Why?") for _ in range(6)]) == 6


def test_who_gives_no_answer_may_have_done_it_and_takes_it_back_too(service):
    service.start("--stub-first-s", "60")
    service.start()
    with pytest.raises(NotAllReplicasError, match=r"100-r0-0: no answer .* it failed at 100-r0-0, 101-r0-0\."):
        tell_all("405b", "/v1/completions", {"model": "405b", "prompt": "Why?"}, undo="/nothing", timeout=1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"path": "/pause", "body": "x"}, "The body 'x' is no mapping"),
        ({"path": "pause"}, "'pause' is no path: it begins with /"),
        ({"path": "/pause", "undo": "resume"}, "'resume' is no path"),
    ],
)
def test_words_that_are_no_request_are_refused_before_anything_is_sent(service, words, said):
    service.start()
    with pytest.raises(InvalidRequestError, match=said):
        tell_all("405b", **words)
    client = connect("405b")
    assert client.completions.create(model=client.model, prompt="Why?").choices  # it is not paused


def test_nobody_is_there_to_be_told(service):
    engine = service.start()
    service.publish(engine, state="stopped", stage="stopped")
    with pytest.raises(ServiceNotFoundError, match="no ready replica to tell: `hpc-serve status 405b`"):
        tell_all("405b", "/pause")
    with pytest.raises(ServiceNotFoundError, match=r"No service '405' in .* Did you mean '405b'"):
        tell_all("405", "/pause")
