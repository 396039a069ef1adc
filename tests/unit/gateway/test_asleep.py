"""A service that is asleep, behind a gateway; Slurm is a stand-in."""

from __future__ import annotations

from tests.unit.client.test_wake import asleep, slurm, when_submitted

assert asleep
assert slurm  # fixtures


def test_it_is_there_and_the_answer_says_how_to_wake_it(asleep, slurm, gateway):
    front = gateway()
    for model in ("405b", "meta-llama/Llama-3.1-405B-Instruct"):
        answer = front.complete(model)
        assert (answer.status, answer.code) == (503, "no_replica")
        assert "405b is asleep" in answer.json["error"]["message"]
    assert front.ask("GET", "/v1/models").json["data"] == []
    assert "405b (asleep)" in front.complete("other").json["error"]["message"]
    assert len(slurm.scripts) == 0


def test_a_request_wakes_it(asleep, slurm, gateway):
    when_submitted(slurm, 1, lambda: asleep.start(job_id="101_0"))
    answer = gateway(wake=True, wait_s=120.0).complete()
    assert answer.status == 200
    assert len(slurm.scripts) == 1
