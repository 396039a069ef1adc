"""What a record and an answer amount to, how long to wait for it, and which replica is next: values in, words out."""

import pytest

from hpc_serve.client.pool import ReplicaPool, Target
from hpc_serve.client.views import Answer, ServiceView, assess_replica, listing, not_found, summary
from hpc_serve.client.wait import WaitPolicy
from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.rendezvous.record import JobEnd, Progress, SubmittedJob
from tests.support.stubs import make_record

LIVE = Answer(verdict="live", host="10.0.0.2")


def seen(answer=None, *, lease_age_s=0.0, wall_age_s=0.0, **fields):
    return assess_replica(make_record(**fields), lease_age_s=lease_age_s, wall_age_s=wall_age_s, answer=answer)


def view(*replicas, service="405b", **jobs):
    return ServiceView(service=service, home="/home", replicas=replicas, **jobs)


def queued(job_id="9", **fields):
    return SubmittedJob(service="405b", model="m", cluster="slurm", job_id=job_id, submitted_at=1.0, **fields)


CANCELLED = JobEnd(state="stopped", reason="it was cancelled before it began", at=2.0)


STARTING = {"state": "starting", "stage": "waiting for Ray nodes", "progress": Progress(done=1, total=2)}
FAILED = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 1: CUDA out of memory"}


@pytest.mark.parametrize(
    ("replica", "condition", "line"),
    [
        (seen(LIVE), "live", "ready"),
        (seen(LIVE, lease_age_s=100.0, wall_age_s=9999.0), "live", "ready"),
        (seen(**STARTING), "coming", "starting: waiting for Ray nodes 1/2 (job 123)"),
        (
            seen(**STARTING, lease_age_s=29.0, wall_age_s=800.0),
            "coming",
            "starting: waiting for Ray nodes 1/2 (job 123)",
        ),
        (
            seen(**STARTING, lease_age_s=31.0),
            "lost",
            "lost: job 123 does not renew its record, for 31 s now; it was waiting for Ray nodes 1/2",
        ),
        (
            seen(**STARTING, wall_age_s=7200.0),
            "lost",
            "lost: job 123 does not renew its record, for 2 hours now; it was waiting for Ray nodes 1/2",
        ),
        (seen(**FAILED), "failed", "failed: engine exited with 1: CUDA out of memory (job 123)"),
        (seen(state="failed", exit_code=3, failed_part="ray"), "failed", "failed: ray: exit code 3 (job 123)"),
        (seen(state="stopped"), "stopped", "stopped: job 123"),
        (seen(state="draining", stage="stopping"), "draining", "draining: stopping (job 123)"),
        (seen(Answer(verdict="draining", host="a")), "draining", "draining: job 123"),
        (
            seen(Answer(verdict="silent", host="a", detail="timed out"), hosts=("a", "b"), port=7),
            "unreachable",
            "unreachable: ready by its record, but no answer from a:7, b:7 to this machine: timed out (job 123)",
        ),
        (
            seen(Answer(verdict="silent"), lease_age_s=31.0),
            "lost",
            "lost: job 123 does not renew its record, for 31 s now; it was ready",
        ),
        (
            seen(Answer(verdict="stranger", host="a"), port=7),
            "unreachable",
            "unreachable: something else answers at a:7, the engine is gone (job 123)",
        ),
        (
            seen(Answer(verdict="unhealthy", host="a", detail="/health answers 503"), port=7),
            "unreachable",
            "unreachable: its engine at a:7 is not healthy: /health answers 503 (job 123)",
        ),
    ],
)
def test_what_a_replica_is_and_how_it_is_said(replica, condition, line):
    assert replica.condition == condition
    assert summary(view(replica)) == line


def test_another_key_is_explained():
    replica = seen(Answer(verdict="other key", host="a"))
    assert replica.condition == "unreachable"
    assert "restart it" in replica.note


def test_the_best_replica_speaks_for_the_service():
    failed, starting, live = seen(**FAILED, job_id="1"), seen(**STARTING, job_id="2"), seen(LIVE, job_id="3")
    assert summary(view(failed, starting, live)) == "ready"
    assert summary(view(live, live)) == "ready (2 replicas)"
    assert summary(view(failed, starting)).startswith("starting")
    assert summary(view(failed, queued=(queued("4"),))).startswith("submitted: job 4")
    assert summary(view(failed, seen(state="stopped", job_id="5"))) == "stopped: job 5"
    withdrawn = (queued("6", end=CANCELLED),)
    assert summary(view(withdrawn=withdrawn)) == "stopped: it was cancelled before it began (job 6)"
    assert summary(view(failed, withdrawn=withdrawn)).startswith("failed: "), "it ended later"


def test_a_job_that_was_cancelled_in_the_queue_is_not_waited_for():
    withdrawn = view(withdrawn=(queued(end=CANCELLED),))
    assert withdrawn.exists
    assert not withdrawn.is_coming
    assert "405b is stopped: it was cancelled before it began (job 9). Start one" in not_found(withdrawn, [])
    patience = WaitPolicy(True)
    patience.next_step_s(view(queued=(queued(),)), nothing_else)
    with pytest.raises(ServiceNotFoundError, match="cancelled before it began"):
        patience.next_step_s(withdrawn, nothing_else)


def test_a_base_url_is_one_for_openai_clients():
    assert seen(LIVE, port=18000).base_url == "http://10.0.0.2:18000/v1"
    assert seen(Answer(verdict="live", host="fd00::1"), port=1).base_url == "http://[fd00::1]:1/v1"


def test_none_live_says_why_and_what_else_there_is():
    others = [view(seen(LIVE), service="8b"), view(seen(**FAILED), service="70b"), view(service="never")]
    text = not_found(view(seen(**STARTING)), others)
    assert "405b is starting: waiting for Ray nodes 1/2 (job 123)" in text
    assert "connect('405b', wait=600)" in text
    assert "  8b: ready\n  70b: failed: engine exited with 1: CUDA out of memory (job 123)" in text
    assert "never" not in text


def test_a_misspelt_name_gets_a_suggestion():
    text = not_found(view(service="405"), [view(seen(LIVE))])
    assert text.startswith("No service '405' in /home. Did you mean '405b'?")
    assert "hpc-serve submit" in not_found(view(), [])


def test_files_that_are_not_trusted_are_told():
    assert "Not trusted:\n  x.json is half-written" in not_found(view(problems=("x.json is half-written",)), [])


def test_a_listing_has_a_line_for_each():
    assert listing([view(seen(LIVE)), view(service="8b")]) == "  405b: ready\n  8b: nothing was ever published"


# WaitPolicy


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def nothing_else():
    return ()


@pytest.mark.parametrize("wait", [None, False, 0])
def test_no_waiting_is_the_default(clock, wait):
    patience = WaitPolicy(wait, clock=clock)
    assert not patience.waits
    with pytest.raises(ServiceNotFoundError, match="starting: waiting for Ray nodes"):
        patience.next_step_s(view(seen(**STARTING)), nothing_else)


def test_what_is_coming_is_waited_for_until_the_deadline(clock):
    patience = WaitPolicy(60, clock=clock)
    assert patience.next_step_s(view(seen(**STARTING)), nothing_else) == 1.0
    clock.now_s += 59.5
    assert patience.next_step_s(view(seen(**STARTING)), nothing_else) == 0.5
    clock.now_s += 0.5
    with pytest.raises(WaitTimeoutError, match="not ready after 60 s: starting: waiting for Ray nodes 1/2"):
        patience.next_step_s(view(seen(**STARTING)), nothing_else)


def test_true_waits_as_long_as_something_is_coming(clock):
    patience = WaitPolicy(True, clock=clock)
    clock.now_s += 1e6
    assert patience.next_step_s(view(queued=(queued(),)), nothing_else) == 1.0


def test_what_fails_on_the_way_ends_the_wait_at_once(clock):
    patience = WaitPolicy(600, clock=clock)
    patience.next_step_s(view(seen(**STARTING)), nothing_else)
    with pytest.raises(ServiceFailedError, match=r"405b failed: engine exited with 1: CUDA out of memory"):
        patience.next_step_s(view(seen(**FAILED)), nothing_else)


def test_what_is_lost_on_the_way_ends_the_wait(clock):
    patience = WaitPolicy(600, clock=clock)
    patience.next_step_s(view(seen(**STARTING)), nothing_else)
    with pytest.raises(ServiceFailedError, match=r"405b lost: job 123 does not renew"):
        patience.next_step_s(view(seen(**STARTING, lease_age_s=40.0)), nothing_else)


@pytest.mark.parametrize("before", [view(), view(seen(**FAILED)), view(seen(state="stopped"))])
def test_what_is_not_there_is_not_believed_at_once(clock, before):
    """A shared filesystem may show a new record late: the failure of the last run is no news."""
    patience = WaitPolicy(600, clock=clock)
    assert patience.next_step_s(before, nothing_else) > 0
    clock.now_s += 29
    assert patience.next_step_s(before, nothing_else) > 0
    clock.now_s += 2
    with pytest.raises((ServiceNotFoundError, ServiceFailedError)):
        patience.next_step_s(before, nothing_else)


@pytest.mark.parametrize("wait", [-1, float("nan")])
def test_a_wait_that_is_none_is_refused(wait):
    with pytest.raises(InvalidRequestError, match="wait is"):
        WaitPolicy(wait)


# Pool


def targets(*names):
    return [Target(name=name, host="h", port=1) for name in names]


def test_the_least_loaded_is_taken():
    pool = ReplicaPool()
    assert pool.take() is None
    pool.fill(targets("a", "b", "c"))
    taken = [pool.take() for _ in range(6)]
    assert sorted(target.name for target in taken) == ["a", "a", "b", "b", "c", "c"]
    freed = taken[0]
    pool.give_back(freed)
    assert pool.take() == freed


def test_equals_share_by_chance():
    pool = ReplicaPool()
    pool.fill(targets("a", "b"))
    seen_names = set()
    for _ in range(200):
        target = pool.take()
        pool.give_back(target)
        seen_names.add(target.name)
    assert seen_names == {"a", "b"}


def test_tried_and_dropped_ones_are_not_offered():
    pool = ReplicaPool()
    pool.fill(targets("a", "b"))
    assert pool.take({"a"}).name == "b"
    pool.drop("b")
    assert pool.take({"a"}) is None
    assert pool.take().name == "a"
    assert len(pool) == 1


def test_counts_survive_a_refill():
    pool = ReplicaPool()
    pool.fill(targets("a", "b"))
    busy = pool.take()
    (other,) = {"a", "b"} - {busy.name}
    pool.fill(targets("a", "b"))
    assert [pool.take().name for _ in range(1)] == [other]
    pool.fill([])
    pool.give_back(busy)
