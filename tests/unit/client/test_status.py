"""The status of a replica from its record and a probe, and how long to wait for it."""

import pytest

from hpc_serve.client.discovery.wait import WaitPolicy
from hpc_serve.client.replicas.status import (
    ProbeResult,
    ServiceStatus,
    assess_replica,
    assess_submitted,
    listing,
    not_found,
    summary,
)
from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.rendezvous.record import JobEnd, Progress
from tests.support.stubs import make_record, make_submitted
from tests.unit.client.conftest import FakeClock

READY = ProbeResult(status="ready", host="10.0.0.2")


def seen(probe=None, *, lease_age_s=0.0, wall_age_s=0.0, **fields):
    return assess_replica(make_record(**fields), lease_age_s=lease_age_s, wall_age_s=wall_age_s, probe=probe)


def view(*replicas, service="405b", **fields):
    return ServiceStatus(service=service, home="/home", replicas=replicas, **fields)


def submitted(job_id="9", **fields):
    return assess_submitted(make_submitted(job_id=job_id, submitted_at=1.0, **fields))


CANCELLED = JobEnd(state="stopped", reason="it was cancelled before it began", at=2.0)


STARTING = {"state": "starting", "stage": "waiting for Ray nodes", "progress": Progress(done=1, total=2)}
UNRESPONSIVE = {"state": "unresponsive", "stage": "unresponsive", "reason": "its engine leaves /health unanswered"}
FAILED = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 1: CUDA out of memory"}


NOT_RENEWED = "unknown: its record has not been renewed for"


@pytest.mark.parametrize(
    ("replica", "line"),
    [
        (seen(**STARTING), "starting: waiting for Ray nodes 1/2"),
        (seen(**STARTING, lease_age_s=29.0, wall_age_s=800.0), "starting: waiting for Ray nodes 1/2"),
        (seen(**STARTING, lease_age_s=31.0), f"{NOT_RENEWED} 31 s; it was waiting for Ray nodes 1/2"),
        (seen(**STARTING, wall_age_s=7200.0), f"{NOT_RENEWED} 2 h; it was waiting for Ray nodes 1/2"),
        (seen(**FAILED), "failed: engine exited with 1: CUDA out of memory"),
        (seen(state="failed", exit_code=3, failed_part="ray"), "failed: ray: exit code 3"),
        (seen(state="stopped"), "stopped"),
        (seen(state="draining", stage="stopping"), "draining: stopping"),
        (seen(**UNRESPONSIVE), "unresponsive: its engine leaves /health unanswered"),
        (seen(READY, **UNRESPONSIVE), "unresponsive: its engine leaves /health unanswered"),
        (seen(**UNRESPONSIVE, lease_age_s=31.0), f"{NOT_RENEWED} 31 s; it was unresponsive"),
        (seen(ProbeResult(status="draining", host="a")), "draining"),
        (
            seen(ProbeResult(status="no answer", host="a", detail="timed out"), hosts=("a", "b"), port=7),
            "unresponsive: ready by its record, but no answer from a:7, b:7 to this machine: timed out",
        ),
        (seen(ProbeResult(status="no answer"), lease_age_s=31.0), f"{NOT_RENEWED} 31 s; it was ready"),
        (
            seen(ProbeResult(status="not ours", host="a"), port=7),
            "unresponsive: something else answers at a:7, the engine is gone",
        ),
        (
            seen(ProbeResult(status="unhealthy", host="a", detail="/health answers 503"), port=7),
            "unresponsive: its engine at a:7 is not healthy: /health answers 503",
        ),
        (
            seen(ProbeResult(status="other key", host="a"), port=7),
            "unresponsive: the engine at a:7 has another API key than the service's file: the key was replaced after "
            "it started; restart it",
        ),
    ],
)
def test_what_a_replica_is_and_how_it_is_said(replica, line):
    assert line.partition(":")[0] == replica.state
    assert summary(view(replica)) == f"{line} (job 123)"


@pytest.mark.parametrize("age_s", [{}, {"lease_age_s": 100.0, "wall_age_s": 9999.0}])
def test_a_replica_that_answers_is_ready_however_old_its_record_is(age_s):
    assert summary(view(seen(READY, **age_s))) == seen(READY, **age_s).state == "ready"


def test_the_best_replica_speaks_for_the_service():
    failed, starting, live = seen(**FAILED, job_id="1"), seen(**STARTING, job_id="2"), seen(READY, job_id="3")
    assert summary(view(failed, starting, live)) == "ready"
    assert summary(view(live, live)) == "ready (2 replicas)"
    assert summary(view(failed, starting)).startswith("starting")
    assert summary(view(failed, submitted("4"))) == (
        "pending: it has not started, or its record cannot be seen yet (job 4)"
    )
    assert summary(view(failed, seen(state="stopped", job_id="5"))) == "stopped (job 5)"
    withdrawn = submitted("6", end=CANCELLED)
    assert summary(view(withdrawn)) == "stopped: it was cancelled before it began (job 6)"
    assert summary(view(failed, withdrawn)).startswith("failed: "), "it ended later"


def test_a_job_that_was_cancelled_in_the_queue_is_not_waited_for():
    withdrawn = view(submitted(end=CANCELLED))
    assert withdrawn.exists
    assert not withdrawn.is_coming
    assert "405b is stopped: it was cancelled before it began (job 9). Start one" in not_found(withdrawn, [])
    policy = WaitPolicy(True)
    policy.next_step_s(view(submitted()), nothing_else)
    with pytest.raises(ServiceNotFoundError, match="cancelled before it began"):
        policy.next_step_s(withdrawn, nothing_else)


def test_a_base_url_is_one_for_openai_clients():
    assert seen(READY, port=18000).base_url == "https://10.0.0.2:18000/v1"
    assert seen(ProbeResult(status="ready", host="fd00::1"), port=1).base_url == "https://[fd00::1]:1/v1"


def test_none_live_says_why_and_what_else_there_is():
    others = [view(seen(READY), service="8b"), view(seen(**FAILED), service="70b"), view(service="never")]
    text = not_found(view(seen(**STARTING)), others)
    assert "405b is starting: waiting for Ray nodes 1/2 (job 123)" in text
    assert "connect('405b', wait=600)" in text
    assert "  8b: ready\n  70b: failed: engine exited with 1: CUDA out of memory (job 123)" in text
    assert "never" not in text


def test_a_misspelt_name_gets_a_suggestion():
    text = not_found(view(service="405"), [view(seen(READY))])
    assert text.startswith("No service '405' in /home. Did you mean '405b'?")
    assert "hpc-serve submit" in not_found(view(), [])


def test_files_that_are_not_trusted_are_told():
    assert "Problems:\n  x.json is half-written" in not_found(view(problems=("x.json is half-written",)), [])


def test_a_listing_has_a_line_for_each():
    assert listing([view(seen(READY)), view(service="8b")]) == "  405b: ready\n  8b: nothing was ever published"


# WaitPolicy


@pytest.fixture
def clock():
    return FakeClock()


def nothing_else():
    return ()


@pytest.mark.parametrize("wait", [None, False, 0])
def test_no_waiting_is_the_default(clock, wait):
    policy = WaitPolicy(wait, clock=clock)
    assert not policy.waits
    with pytest.raises(ServiceNotFoundError, match="starting: waiting for Ray nodes"):
        policy.next_step_s(view(seen(**STARTING)), nothing_else)


def test_what_is_coming_is_waited_for_until_the_deadline(clock):
    policy = WaitPolicy(60, clock=clock)
    assert policy.next_step_s(view(seen(**STARTING)), nothing_else) == 0.4
    clock.now_s += 59.75
    assert policy.next_step_s(view(seen(**STARTING)), nothing_else) == 0.25
    clock.now_s += 0.25
    with pytest.raises(WaitTimeoutError, match="not ready after 60 s: starting: waiting for Ray nodes 1/2"):
        policy.next_step_s(view(seen(**STARTING)), nothing_else)


def test_true_waits_as_long_as_something_is_coming(clock):
    policy = WaitPolicy(True, clock=clock)
    clock.now_s += 1e6
    assert policy.next_step_s(view(submitted()), nothing_else) == 1.0


def test_what_its_launcher_found_unresponsive_is_waited_for(clock):
    """Its engine may answer again, or is started again; one that a probe alone found so is nobody's to mend."""
    policy = WaitPolicy(True, clock=clock)
    clock.now_s += 1e6
    assert policy.next_step_s(view(seen(**UNRESPONSIVE)), nothing_else) == 1.0
    with pytest.raises(ServiceNotFoundError, match="unresponsive: ready by its record, but no answer"):
        policy.next_step_s(view(seen(ProbeResult(status="no answer"))), nothing_else)


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        (seen(**FAILED), "405b failed: engine exited with 1: CUDA out of memory"),
        (seen(**STARTING, lease_age_s=40.0), "405b unknown: its record has not been renewed for 40 s"),
    ],
)
def test_what_fails_or_is_not_heard_of_any_more_on_the_way_ends_the_wait_at_once(clock, replica, says):
    policy = WaitPolicy(600, clock=clock)
    policy.next_step_s(view(seen(**STARTING)), nothing_else)
    with pytest.raises(ServiceFailedError, match=says):
        policy.next_step_s(view(replica), nothing_else)


@pytest.mark.parametrize("before", [view(), view(seen(**FAILED)), view(seen(state="stopped"))])
def test_what_is_not_there_is_not_believed_at_once(clock, before):
    """A shared filesystem may show a new record late: the failure of the last run says nothing."""
    policy = WaitPolicy(600, clock=clock)
    assert policy.next_step_s(before, nothing_else) > 0
    clock.now_s += 29
    assert policy.next_step_s(before, nothing_else) > 0
    clock.now_s += 2
    with pytest.raises((ServiceNotFoundError, ServiceFailedError)):
        policy.next_step_s(before, nothing_else)


@pytest.mark.parametrize("wait", [-1, float("nan"), "10m"])
def test_a_wait_that_is_none_is_refused(wait):
    with pytest.raises(InvalidRequestError, match="wait is"):
        WaitPolicy(wait)
