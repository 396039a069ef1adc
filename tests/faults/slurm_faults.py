"""The faults that need a cluster: of nodes, their network, Slurm's own programs, and of what Slurm does to a job."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.cluster import processes, wait_for
from tests.faults.fault import fault
from tests.faults.filesystems import OwnFilesystem
from tests.faults.service import hold
from tests.faults.service_faults import engine_killed, stop
from tests.faults.slurm_service import GONE_S, USER, SlurmService

RAY = (
    *("--nodes", "2", "--gpus-per-node", "1", "--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"),
    *("--backend", "ray", "--nodelist", "n1,n3"),
)


# -- a job's parts on several nodes


def _kill_ray(service: SlurmService, node: str, program: str) -> None:
    pids = [pid for pid in service.pids_on(node) if processes.argv_of(pid)[0].endswith(program)]
    assert pids, f"no {program} on {node}"
    service.signal(pids, signal.SIGKILL)


@fault(needs_slurm=True, hold_s=5.0, first=RAY, ready_after=1)
def raylet_killed(service: SlurmService) -> None:
    """kill -9 of the raylet of a replica's second node."""
    _kill_ray(service, "n3", "raylet/raylet")


@fault(needs_slurm=True, hold_s=5.0, first=RAY, ready_after=1)
def gcs_killed(service: SlurmService) -> None:
    """kill -9 of the GCS of a replica of two nodes."""
    _kill_ray(service, "n1", "gcs/gcs_server")


@fault(needs_slurm=True, hold_s=10.0, first=RAY)
def replica_parted(service: SlurmService) -> Iterator[None]:
    """The two nodes of one replica do not see one another for a while; Slurm and clients see both."""
    service.cluster.part("n1", "n3")
    yield
    service.cluster.join("n1", "n3")


@fault(needs_slurm=True, hold_s=5.0, first=RAY, ready_after=1)
def stop_of_nodes(service: SlurmService) -> None:
    """`hpc-serve stop` of one replica of two nodes."""
    stop(service)


# -- nodes and their network


@fault(needs_slurm=True, ready_after=1)
def node_off(service: SlurmService) -> Iterator[None]:
    """The power of one node is cut: no connection is closed, nothing answers."""
    node = service.node(0)
    service.cluster.disconnect(node)  # or its kernel would close the connections of processes that end
    service.cluster.power_off(node)
    yield
    service.cluster.power_on(node)


@fault(needs_slurm=True, settle_s=3.0)
def node_frozen(service: SlurmService) -> Iterator[None]:
    """SIGSTOP of everything on one node, slurmd too, for a while."""
    pids = service.cluster.pids_on(service.node(0))
    service.signal(pids, signal.SIGSTOP)
    yield
    service.signal(pids, signal.SIGCONT)


@fault(needs_slurm=True, settle_s=5.0)
def link_down(service: SlurmService) -> Iterator[None]:
    """The network of one node is away for a while, and comes back."""
    node = service.node(0)
    service.cluster.disconnect(node)
    yield
    service.cluster.reconnect(node)


@fault(needs_slurm=True, comes_and_goes=True, settle_s=3.0)
def link_flaps(service: SlurmService) -> Iterator[Callable[[], None]]:
    """The network of one node is away for 0.6 s of each second: most packets are late or lost."""
    node = service.node(0)

    def flap() -> None:
        service.cluster.disconnect(node)
        hold(0.6, step_s=0.05)
        service.cluster.reconnect(node)
        hold(0.4, step_s=0.05)

    yield flap
    service.cluster.reconnect(node)


@fault(needs_slurm=True, is_apart=True, hold_s=600.0, bound_s=120.0)
def healthy_pair(service: SlurmService) -> Iterator[None]:
    """Nothing breaks for ten minutes: long steps of both engines, links whose speed changes, and busy cores."""
    chance = random.Random(1)
    with busy_cores(), ThreadPoolExecutor(2) as pool:
        until = time.monotonic() + service.hold_s
        slow = [pool.submit(_slow_replica, service, place, chance.random(), until) for place in (0, 1)]
        yield
        for done in slow:
            done.result()


def _slow_replica(service: SlurmService, place: int, seed: float, until: float) -> None:
    """Let one replica be slow until then (monotonic): every few seconds a long step, and another speed of its link."""
    chance = random.Random(seed)
    node, step = service.node(place), service.step_file(place)
    try:
        for turn in itertools.count(1):
            service.cluster.slow_down(node, chance.choice([800, 1500, 4000]))
            time.sleep(chance.uniform(1, 8))
            if time.monotonic() >= until:
                return
            step.touch()
            # The longest is the prompt of another client, read in one step.
            time.sleep(chance.choice([0.5, 1, 2, 3, 5]) if turn % 10 else 20)
            step.unlink()
    finally:
        step.unlink(missing_ok=True)
        service.cluster.slow_down(node, None)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep two cores busy half of the time, in turns of a fifth of a second."""
    turn = "until = time.time() + 0.1\n    while time.time() < until: pass\n    time.sleep(0.1)"
    program = "import time\nwhile True:\n    " + turn
    programs = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        yield
    finally:
        for busy in programs:
            busy.kill()
            busy.wait()


@fault(needs_slurm=True, comes_and_goes=True, settle_s=3.0)
def link_slow(service: SlurmService) -> Iterator[None]:
    """The network of one node carries 128 kbit/s, less than its share of the requests needs."""
    node = service.node(0)
    service.cluster.slow_down(node, 128)
    yield
    service.cluster.slow_down(node, None)


@fault(needs_slurm=True, load_node="n3", settle_s=5.0)
def network_parted(service: SlurmService) -> Iterator[None]:
    """The client's node no longer sees one replica's node; Slurm, and hosts without clients, see both."""
    service.cluster.part("n3", service.node(0))
    yield
    service.cluster.join("n3", service.node(0))


# -- what Slurm does to a job


@fault(needs_slurm=True, hold_s=5.0, ready_after=1)
def scancel(service: SlurmService) -> None:
    """`scancel` of one replica."""
    service.on_cluster("scancel", service.jobs[0])


@fault(needs_slurm=True, hold_s=10.0, ready_after=1)
def requeue(service: SlurmService) -> None:
    """`scontrol requeue` of one replica."""
    service.on_cluster("scontrol", "requeue", service.jobs[0], user="root")


@fault(needs_slurm=True, hold_s=5.0, ready_after=1)
def time_limit(service: SlurmService) -> None:
    """One replica's job reaches its time limit."""
    service.on_cluster("scontrol", "update", f"jobid={service.jobs[0]}", "timelimit=1", user="root")
    _wait_for_end_of_first(service)


def _wait_for_end_of_first(service: SlurmService) -> None:
    _wait_for_end(service, service.jobs[0])


def _wait_for_end(service: SlurmService, job: str) -> None:
    wait_for(
        lambda: service.on_cluster("squeue", "--noheader", "--jobs", job, "--format=%T") != "RUNNING",
        120 + GONE_S,
        what="the time limit",
        step_s=0.5,
    )


@fault(needs_slurm=True, hold_s=10.0, first=("--partition", "lowprio", "--sbatch", "--requeue"), ready_after=1)
def preempted(service: SlurmService) -> None:
    """A job of a higher partition takes one replica's node; the replica's job is queued again."""
    _preempt(service)


@fault(needs_slurm=True, hold_s=10.0, first=("--partition", "lowprio", "--sbatch", "--no-requeue"), ready_after=1)
def preempted_no_requeue(service: SlurmService) -> None:
    """A job of a higher partition takes one replica's node; the replica's job is ended for good."""
    _preempt(service)


def _preempt(service: SlurmService) -> None:
    node = service.node(0)
    job = service.on_cluster(
        "sbatch", "--parsable", "--partition=gpu", f"--nodelist={node}", "--exclusive", "--output=/dev/null",
        "--wrap", "sleep 600",
    )  # fmt: skip
    wait_for(
        lambda: service.on_cluster("squeue", "--noheader", "--jobs", job, "--format=%T") == "RUNNING",
        GONE_S,
        what="the job that preempts",
        step_s=0.5,
    )


@fault(needs_slurm=True, hold_s=5.0, has_worker=True, ready_after=1)
def scancel_of_ranks(service: SlurmService) -> None:
    """`scancel` of one replica of several ranks: the workers end at Slurm's first signal."""
    scancel(service)


# -- the only replica: the requests that its engine has begun are answered before it ends


@fault(needs_slurm=True, hold_s=5.0, replicas=1, ready_after=0)
def stop_only(service: SlurmService) -> None:
    """`hpc-serve stop` of the only replica."""
    stop(service)


@fault(needs_slurm=True, hold_s=5.0, replicas=1, ready_after=0)
def scancel_only(service: SlurmService) -> None:
    """`scancel` of the only replica."""
    scancel(service)


@fault(needs_slurm=True, hold_s=5.0, replicas=1, ready_after=0)
def time_limit_only(service: SlurmService) -> None:
    """The only replica's job reaches its time limit."""
    time_limit(service)


_KEPT_UP = ("--time", "2", "--signal", "B:USR1@30", "--keep-up")


@fault(needs_slurm=True, hold_s=5.0, replicas=1, ready_after=1, first=_KEPT_UP)
def time_limit_kept_up(service: SlurmService) -> None:
    """The only replica's job reaches its time limit, with --keep-up."""
    _wait_for_end_of_first(service)


@fault(needs_slurm=True, hold_s=5.0, each=_KEPT_UP)
def two_handovers(service: SlurmService) -> Iterator[None]:
    """Both replicas' jobs reach their time limit at the same time, with --keep-up."""
    for job in service.jobs:
        _wait_for_end(service, job)
    yield
    assert len(_jobs(service)) <= 4, "a replica has more than one successor"


@fault(needs_slurm=True, hold_s=20.0, bounds="2:3", slots=4)
def elastic_replica_killed(service: SlurmService) -> Iterator[None]:
    """kill -9 of one of two launchers while a third replica is being added, with --replicas 2:3."""
    wait_for(lambda: len(_jobs(service)) > 2, GONE_S, what="a replica that is added", step_s=0.5)
    service.broken_at = time.monotonic()
    service.signal(service.launcher(0), signal.SIGKILL)
    yield
    assert len(_jobs(service)) <= 3, "there are more replicas than were asked for"


def _jobs(service: SlurmService) -> list[str]:
    """The jobs that wait or run."""
    states = "--states=PENDING,CONFIGURING,RUNNING"
    return service.on_cluster("squeue", "--noheader", "--array", "--user", USER, states, "--format=%i").split()


# -- Slurm's own programs


@fault(needs_slurm=True, hold_s=5.0)
def slurmctld_restarted(service: SlurmService) -> None:
    """The controller ends and is started again at once."""
    service.cluster.stop_controller()
    service.cluster.start_controller()


@fault(needs_slurm=True)
def slurmctld_stopped(service: SlurmService) -> Iterator[None]:
    """The controller is away for a while."""
    service.cluster.stop_controller()
    yield
    service.cluster.start_controller()


@fault(needs_slurm=True)
def slurmd_killed(service: SlurmService) -> Iterator[None]:
    """kill -9 of one node's slurmd, which is started again."""
    node = service.node(0)
    service.cluster.kill_slurmd(node)
    yield
    service.cluster.start_slurmd(node)


# -- the home, as an ordinary user has it


@fault(needs_slurm=True, hides_records=True, settle_s=3.0)
def home_unreadable(service: SlurmService) -> Iterator[None]:
    """The home's mode is 0 for a while."""
    mode = service.home.stat().st_mode
    service.home.chmod(0)
    yield
    service.home.chmod(mode)


@fault(needs_slurm=True, hold_s=45.0, settle_s=3.0)
def home_read_only(service: SlurmService) -> Iterator[None]:
    """The records can be read and not written, for longer than their lease."""
    service.service_folder.chmod(0o500)
    yield
    service.service_folder.chmod(0o700)


@fault(needs_slurm=True, filesystem="own", hold_s=45.0, settle_s=3.0)
def home_frozen(service: SlurmService) -> Iterator[None]:
    """Whoever writes to the home hangs, for longer than a record's lease."""
    assert isinstance(service.filesystem, OwnFilesystem)
    service.filesystem.set_frozen(True)
    yield
    service.filesystem.set_frozen(False)


@fault(needs_slurm=True, filesystem="own", hold_s=45.0, settle_s=3.0)
def home_full(service: SlurmService) -> Iterator[None]:
    """The home's disk is full, for longer than a record's lease."""
    assert isinstance(service.filesystem, OwnFilesystem)
    filler = service.filesystem.fill()
    assert service.run(["cp", "/bin/true", str(service.home)]).returncode == 1, "the home is not full"
    yield
    filler.unlink()


@fault(needs_slurm=True, filesystem="lagging", hold_s=3.0)
def engine_killed_home_lags(service: SlurmService) -> None:
    """kill -9 of one engine, where clients see changes of the home some 20 s late."""
    _check_that_it_lags(service)
    engine_killed(service)


@fault(needs_slurm=True, filesystem="lagging", hold_s=3.0, ready_after=1)
def stop_home_lags(service: SlurmService) -> None:
    """`hpc-serve stop` of one replica, where clients see changes of the home some 20 s late."""
    _check_that_it_lags(service)
    stop(service)


def _check_that_it_lags(service: SlurmService) -> None:
    path = service.home / "seen-late"
    look = ["test", "-e", str(path)]
    assert service.run(look).returncode == 1
    service.on_cluster("touch", str(path), node=service.node(0))
    assert service.run(look).returncode == 1, "a new file of another host was seen at once"


# -- clocks


@fault(needs_slurm=True, hold_s=15.0, clock_s=300)
def clock_ahead(service: SlurmService) -> None:
    """The clock of one node is 5 minutes ahead from the start."""
    _check_clock(service)


@fault(needs_slurm=True, hold_s=15.0, clock_s=-300)
def clock_behind(service: SlurmService) -> None:
    """The clock of one node is 5 minutes behind from the start."""
    _check_clock(service)


def _check_clock(service: SlurmService) -> None:
    records = [json.loads(path.read_text()) for path in service.records()]
    (ahead_s,) = (record["updated_at"] - time.time() for record in records if record["job_id"] == service.jobs[0])
    assert abs(ahead_s - service.fault.clock_s) < 60, f"the replica's clock is {ahead_s:.0f} s ahead"


# -- streams that are longer than what Slurm leaves a job (KillWait, 30 s)


@fault(needs_slurm=True, hold_s=40.0, token_s=1.2, ready_after=1)
def scancel_long_streams(service: SlurmService) -> None:
    """`scancel` of one replica, while answers take 48 s."""
    scancel(service)


@fault(needs_slurm=True, hold_s=40.0, token_s=1.2, ready_after=1)
def stop_long_streams(service: SlurmService) -> None:
    """`hpc-serve stop` of one replica, while answers take 48 s."""
    stop(service)
