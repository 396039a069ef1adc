"""The ground that other tests stand on: hosts apart from one another, users without rights, and no trace at the end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import ClusterConfig, ClusterError, SlurmCluster, processes, wait_for
from tests.cluster.config import CHECKOUT, INTERFACE
from tests.cluster.cpu_shares import NoCpuControllerError, cpu_shares
from tests.cluster.hosts import LOGIN_MAC

pytestmark = pytest.mark.slurm


def test_a_job_of_two_nodes_sees_two_hosts(cluster: SlurmCluster) -> None:
    look = 'echo "$(id -un) $(hostname) $(hostname -I) $CUDA_VISIBLE_DEVICES $(mktemp /tmp/mine.XXX | wc -l)"; ls /tmp'
    done = cluster.run(  # by name: a job of another test may still be ending on one of them
        ["srun", "--nodelist=n1,n2", "--ntasks-per-node=1", "--gres=gpu:2", "--label", "bash", "-c", look],
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if " alice " in line)
    assert [line.split()[2:5] for line in lines] == [
        ["n1", cluster.address("n1"), "0,1"],
        ["n2", cluster.address("n2"), "0,1"],
    ]
    assert done.stdout.count("mine.") == 2, "each host has a /tmp of its own"


@pytest.mark.parametrize("script", sorted((CHECKOUT / "sbatch").glob("*.sh")), ids=lambda path: path.name)
def test_a_committed_script_would_be_scheduled(cluster: SlurmCluster, script: Path) -> None:
    wanted = next(line for line in script.read_text().splitlines() if line.startswith("#SBATCH --nodes="))
    nodes = min(int(wanted.partition("=")[2]), len(cluster.nodes))  # a slice of four hosts: as many as there are
    done = cluster.run(["sbatch", "--test-only", f"--nodes={nodes}", script])
    assert done.returncode == 0, done.stderr


def test_a_home_is_its_owners_on_every_host(cluster: SlurmCluster) -> None:
    assert cluster.run(["bash", "-c", "echo mine > ~/note"], node="n1").returncode == 0
    assert cluster.run(["cat", "note"], node="n2").stdout == "mine\n"
    note = cluster.home("alice") / "note"
    assert "Permission denied" in cluster.run(["cat", note], user="mallory").stderr


def test_a_low_priority_job_gives_way_and_comes_back(cluster: SlurmCluster) -> None:
    def state(job: str) -> str:
        return cluster.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).stdout.strip()

    def submit(partition: str, seconds: int) -> str:
        everything = ["--nodes=3", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}"]
        done = cluster.run(["sbatch", "--parsable", f"--partition={partition}", *everything])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    low = submit("lowprio", 600)
    wait_for(lambda: state(low) == "RUNNING", 180, what="the low-priority job to run")
    high = submit("gpu", 600)
    wait_for(lambda: state(high) == "RUNNING" and state(low) == "PENDING", 180, what="the job to give way")
    cluster.run(["scancel", low, high])
    wait_for(lambda: not cluster.processes(), 180, what="both jobs to end")


def test_a_signal_reaches_the_command_and_its_exit_code_comes_back(cluster: SlurmCluster) -> None:
    started = cluster.popen(["bash", "-c", "trap 'echo heard; exit 3' TERM; echo on; while :; do sleep 0.05; done"])
    assert started.stdout is not None
    assert started.stdout.readline() == "on\n"
    started.terminate()
    assert started.communicate(timeout=180)[0] == "heard\n"
    assert started.returncode == 3


def test_a_command_that_takes_too_long_leaves_no_process(cluster: SlurmCluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sleep", "600"], user="mallory", node="n3", timeout=0.5)
    wait_for(lambda: not cluster.processes("mallory"), 180, what="the command to end")


@pytest.fixture
def other(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """A second, small cluster beside the first."""
    name = f"{cluster.config.name[:13]}-2"
    other = SlurmCluster(ClusterConfig(name=name, num_nodes=1, visible=cluster.config.visible))
    yield other
    other.down()


def owner_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return None


def test_two_clusters_share_nothing_and_the_second_leaves_no_trace(cluster: SlurmCluster, other: SlurmCluster) -> None:
    interfaces = os.listdir("/sys/class/net")
    other.up()
    assert other.address("n1") == cluster.address("n1")
    assert other.run(["bash", "-c", "setsid sleep 600 &> /dev/null &"], node="n1").returncode == 0
    wait_for(lambda: [process.argv for process in other.processes()] == [("sleep", "600")], 180, what="a runaway")
    user_id = other.user_id("alice")
    assert user_id != cluster.user_id("alice")
    other.down()
    assert not other.config.state.exists()
    assert os.listdir("/sys/class/net") == interfaces
    assert str(other.config.state) not in Path("/proc/mounts").read_text()
    assert user_id not in {owner_of(pid) for pid in processes.pids()}
    assert cluster.run(["sinfo"]).returncode == 0


def test_a_start_that_was_broken_off_is_made_good(other: SlurmCluster) -> None:
    other.up()
    other.power_off("n1")
    assert not other.is_up()
    other.up()
    assert other.node_state("n1") == "idle"


def test_a_cluster_that_is_up_is_not_resized_under_its_users(other: SlurmCluster) -> None:
    other.up()
    larger = SlurmCluster(replace(other.config, num_nodes=2))
    with pytest.raises(ClusterError, match="is up with other settings"):
        larger.up()
    assert other.is_up()


def test_a_node_without_power_is_noticed_and_comes_back(other: SlurmCluster) -> None:
    other.up()
    other.power_off("n1")
    wait_for(lambda: other.node_state("n1") in ("idle*", "down*"), 300, what="Slurm to miss the node")
    other.power_on("n1")
    assert other.node_state("n1") == "idle"


def test_a_node_that_comes_and_goes_leaves_the_address_of_the_login_node(other: SlurmCluster) -> None:
    other.up()
    address = ["cat", f"/sys/class/net/{INTERFACE}/address"]
    assert other.run(address).stdout.strip() == LOGIN_MAC
    other.power_off("n1")
    other.power_on("n1")
    assert other.run(address).stdout.strip() == LOGIN_MAC


def test_a_node_that_was_unplugged_and_then_ended_comes_back(other: SlurmCluster) -> None:
    other.up()
    listener = other.popen(["python3", "-m", "http.server", "8000"], user="mallory", node="n1")
    reach = ["bash", "-c", f"exec 3<>/dev/tcp/{other.address('n1')}/8000 && sleep 600"]
    try:
        wait_for(lambda: other.run([*reach[:2], reach[2].replace(" && sleep 600", "")]).returncode == 0, 180)
        open_connection = other.popen(reach)
        other.disconnect("n1")
        other.power_off("n1")
        assert other.what_is_unwell(grace_s=0) == "hosts are down: n1"
        other.power_on("n1")
        with open_connection:
            open_connection.kill()
    finally:
        with listener:
            listener.kill()
    assert other.what_is_unwell(grace_s=180) == ""


def test_hosts_are_parted_and_a_cable_is_slow_until_they_are_not(cluster: SlurmCluster) -> None:
    def reaches(host: str, node: str, *, within_s: int = 60) -> bool:
        ping = ["bash", "-c", f"exec 3<>/dev/tcp/{cluster.address(host)}/6818"]  # slurmd's port
        return cluster.run(["timeout", str(within_s), *ping], node=node).returncode == 0

    assert reaches("n1", "n2")
    cluster.part("n1", "n2")
    assert not reaches("n1", "n2", within_s=2)
    assert not reaches("n2", "n1", within_s=2)
    assert reaches("n1", "n3")
    cluster.join("n1", "n2")
    assert reaches("n1", "n2")
    cluster.slow_down("n1", 128)
    shape = ["tc", "qdisc", "show", "dev", "eth0"]
    assert "rate 128Kbit" in cluster.run(shape, user="root", node="n1").stdout
    cluster.slow_down("n1", None)
    assert "tbf" not in cluster.run(shape, user="root", node="n1").stdout


def test_what_a_job_starts_stays_in_its_node_s_share_of_the_cores(other: SlurmCluster) -> None:
    other.up()
    try:
        with cpu_shares(other) as shares:
            shares.limit(0.5)
            script = "#!/bin/bash\nsetsid sleep 601 &\nsrun /usr/bin/sleep 602\n"
            done = other.run(["sbatch", "--output=/dev/null"], input=script)
            assert done.returncode == 0, done.stderr
            sleeps = {("sleep", "601"), ("/usr/bin/sleep", "602")}
            wait_for(lambda: sleeps <= {process.argv for process in other.processes()}, 180, what="both to run")
            assert [pid for pid in other.pids_on("n1") if shares.holds(pid, "n1") is False] == []
            assert [pid for pid in other.pids_on("login") if shares.holds(pid, "n1")] == []
            shares.limit(None)
            groups = shares.groups
            assert all(group.exists() for group in groups)
    except NoCpuControllerError as error:
        pytest.skip(str(error))
    assert not any(group.exists() for group in groups)


def test_commands_say_that_the_controller_is_away(other: SlurmCluster) -> None:
    other.up()
    other.stop_controller()
    assert "Unable to contact slurm controller" in other.run(["squeue"]).stderr
    other.start_controller()
    assert other.run(["squeue"]).returncode == 0


def test_a_wait_says_what_it_waited_for() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for spring; last seen: 0"):
        wait_for(lambda: 0, 0.2, what="spring", step_s=0.05)
