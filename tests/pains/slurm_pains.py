"""Pains of a job around its engine: real Slurm and real Ray on three hosts, with the stub in vLLM's place."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.cluster import wait_for
from tests.cluster.processes import variable_of
from tests.e2e.jobs import STUB
from tests.pains.pain import Seen, pain
from tests.pains.site import Job, Site, before_attempts, replaced

DOCKER = "172.17.0.1/16"
RAY: dict[str, Any] = {"backend": "ray"}
MP: dict[str, Any] = {"backend": "mp"}
ONE_NODE: dict[str, Any] = {"num_nodes": 1, "pipeline_parallel_size": 1}
TOO_FEW_TASKS = 80
NCCL_SAID = (
    "[2026-11-22 21:31:02] vm:27836:27836 [0] bootstrap.cc:126 (bootstrapNetInit) NCCL WARN Bootstrap : no socket "
    "interface found"
)


def _docker(site: Site, node: str) -> AbstractContextManager[None]:
    add = f"ip link add docker0 type bridge && ip address add {DOCKER} dev docker0 && ip link set docker0 up"
    return site.changed(node, ("sh", "-c", add), ("ip", "link", "delete", "docker0"))


@pain(1, "two nodes with one address", r"docker0|172\.17\.0\.1")
def one_address(site: Site) -> Seen:
    """HPC_SERVE_INTERFACE names docker0, which has the same address on every node."""
    with _docker(site, "n1"), _docker(site, "n2"):
        return site.failed(site.submit("one-address", env={"HPC_SERVE_INTERFACE": "docker0"}, **MP))


@pain(1, "two nodes say the same address", r"2 nodes say that their address is 172\.17\.0\.1")
def one_address_each(site: Site) -> Seen:
    """The same on three nodes, set after the head's address was chosen."""
    edit = replaced("    srun --nodes", "    export HPC_SERVE_INTERFACE=docker0\n    srun --nodes")
    with _docker(site, "n1"), _docker(site, "n2"), _docker(site, "n3"):
        return site.failed(site.submit("one-address-each", edit=edit, num_nodes=3, pipeline_parallel_size=3, **MP))


@pain(2, "a node never joins", r"no launcher from node rank 1")
def absent_node(site: Site) -> Seen:
    """srun was told to start one launcher for a job of two nodes."""
    edit = replaced('--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"', "--nodes=1 --ntasks=1")
    return site.failed(site.submit("absent", edit=edit, env={"HPC_SERVE_JOIN_S": "5"}, **RAY))


@pain(3, "Ray's and other ports clash", r"attempt 1 met a port or folder in use.*and was ready")
def port_taken(site: Site) -> Seen:
    """Another program listens on the port that a person has named, and ends after the first attempt."""
    begin = (
        "python -c \"import socket, time; s = socket.create_server(('', 23999)); time.sleep(600)\" & thief=$!; "
        "until (: <>/dev/tcp/127.0.0.1/23999) 2>/dev/null; do :; done"
    )
    steps = f"    if [[ $attempt -eq 1 ]]; then {begin}; else kill $thief; fi\n"
    edit = replaced("    srun --nodes", f"{steps}    srun --nodes")
    job = site.submit("port-taken", "--port", "23999", edit=edit, **ONE_NODE)
    site.ready(job)
    said = " ".join(line for line in site.script_log(job).splitlines() if "attempt" in line)
    return replace(_cured(job, f"{said} and was ready", by="the script"), is_before_weights=True)


@pain(4, "Ray does not start on a node", r"libcuda-of-nobody\.so")
def broken_ray(site: Site) -> Seen:
    """On the second node `ray` ends at once, for want of a library."""
    ray = site.alice.write(
        "broken-ray/ray",
        '#!/bin/bash\n[[ $SLURM_NODEID != 1 ]] || { echo "ImportError: libcuda-of-nobody.so: cannot open shared object '
        'file: No such file or directory"; exit 9; }\nexec "$REAL_RAY" "$@"\n',
    )
    ray.chmod(0o755)
    path = f"REAL_RAY=$(command -v ray)\nexport REAL_RAY PATH={ray.parent}:$PATH"
    return site.failed(site.submit("broken-ray", edit=before_attempts(path), **RAY))


@pain(4, "Ray's head dies while the others join it", r"gcs_server")
def gcs_killed(site: Site) -> Seen:
    """kill -9 of Ray's gcs_server while the head waits for the second node's Ray."""
    ray = site.alice.write(
        "slow-ray/ray", '#!/bin/bash\n[[ $SLURM_NODEID != 1 ]] || exec sleep 600\nexec "$REAL_RAY" "$@"\n'
    )
    ray.chmod(0o755)
    path = f"REAL_RAY=$(command -v ray)\nexport REAL_RAY PATH={ray.parent}:$PATH"
    job = site.submit("gcs-killed", edit=before_attempts(path), **RAY)
    site.alice.wait_for_record("gcs-killed", job.job_id, lambda record: record["stage"] == "waiting for Ray nodes", 300)
    _kill(site, "gcs_server")
    return site.failed(job)


@pain(5, "Ray runs out of tasks: the cgroup's limit", r"room for \d+ of \d+ tasks")
def few_tasks(site: Site) -> Seen:
    """The first node's slurmd is in a cgroup whose pids.max leaves too few."""
    with site.cgroup("n1", "pids", "pids.max", TOO_FEW_TASKS):
        return site.failed(site.submit("few-tasks", **RAY))


@pain(5, "Ray runs out of threads: ulimit -u", r"nproc is 150 .*and you have \d+ processes and threads")
def few_processes(site: Site) -> Seen:
    """The script lowers the limit of processes to 150; Ray's head has more threads."""
    return site.failed(site.submit("few-processes", edit=before_attempts("ulimit -u 150"), **RAY))


@pain(6, "a folder in /tmp is somebody else's", r"/tmp/ray")
def others_folder(site: Site) -> Seen:
    """Mallory has made /tmp/ray on the first node, and alice's jobs are to use it."""
    made = site.mallory.run("mkdir", "-m", "777", "-p", "/tmp/ray", node="n1")
    assert made.returncode == 0, made.stderr
    try:
        return site.failed(site.submit("others-folder", env={"HPC_SERVE_TMPDIR": "/tmp/ray"}, **RAY))
    finally:
        site.mallory.run("rmdir", "/tmp/ray", node="n1")


@pain(7, "AF_UNIX path too long", r"too long")
def long_path(site: Site) -> Seen:
    """HPC_SERVE_TMPDIR is 70 characters long."""
    return site.failed(site.submit("long-path", env={"HPC_SERVE_TMPDIR": "/tmp/" + "d" * 65}, **RAY))


@pain(8, "Gloo cannot connect: a firewall between the nodes", r"cannot connect to n2")
def firewall(site: Site) -> Seen:
    """iptables on the second node refuses connections to the ports that the kernel chooses."""
    rule = ("INPUT", "-p", "tcp", "--syn", "--dport", "32768:65535", "-j", "REJECT")
    with site.changed("n2", ("iptables", "-A", *rule), ("iptables", "-D", *rule)):
        return site.failed(site.submit("firewall", **MP))


@pain(8, "Gloo is told an interface that is not there", r"ib9")
def gloo_interface(site: Site) -> Seen:
    """GLOO_SOCKET_IFNAME names an interface that no node has."""
    return site.failed(site.submit("gloo-interface", env={"GLOO_SOCKET_IFNAME": "ib9"}, **MP))


@pain(9, "NCCL is told an interface that is not there", r"ib9")
def nccl_interface(site: Site) -> Seen:
    """NCCL_SOCKET_IFNAME names an interface that no node has."""
    return site.failed(site.submit("nccl-interface", env={"NCCL_SOCKET_IFNAME": "ib9"}, **MP))


@pain(9, "NCCL's own words of an interface that is not there", r"no network interface", how="stand-in")
def nccl_words(site: Site) -> Seen:
    """The stub says what NCCL 2.30.7 said here, without a GPU, of an NCCL_SOCKET_IFNAME that no node has."""
    return site.failed(site.submit("nccl-words", "--stub-fail", NCCL_SAID, **MP))


@pain(
    11, "kill -9 of an engine", r"the kernel has killed none for memory on n1: another program or a person sent SIGKILL"
)
def killed_stub(site: Site) -> Seen:
    """The stub is killed while it serves. Seconds are from then on, until Slurm has its node back."""
    job = site.submit("killed-stub", options=("--nodelist=n1",), engine_restarts=0, **ONE_NODE)
    site.ready(job)
    began_at = time.monotonic()
    for one in site.alice.processes():
        if str(STUB) in one.argv[:2]:
            os.kill(one.pid, signal.SIGKILL)
    wait_for(lambda: not site.alice.is_queued(job.job_id), 180, what="the end of the job")
    return site.doctor(job, time.monotonic() - began_at)


@pain(18, "the kernel ends what takes too much memory", r"killed \d+ process.* of this job on n1 .*allows 300 MiB")
def greedy_engine(site: Site) -> Seen:
    """In the stub's place a program that takes ever more memory; the first node's slurmd is in a cgroup of 300 MiB."""
    hog = site.alice.write("hog.py", "kept = []\nwhile True:\n    kept.append(b'x' * (8 << 20))\n")
    with site.cgroup("n1", "memory", "memory.limit_in_bytes", 300 * 2**20):
        edit = replaced(str(STUB), str(hog))
        return site.failed(site.submit("greedy", edit=edit, options=("--nodelist=n1",), **ONE_NODE))


@pain(13, "a slow load is killed by a fixed deadline", r"ready after \d+ s")
def slow_load(site: Site) -> Seen:
    """Loading takes three times as long as a start may stand still."""
    job = site.submit("slow", "--stub-load-s", "45", env={"HPC_SERVE_STALL_S": "15"}, **ONE_NODE)
    site.ready(job)
    return _cured(job, f"ready after {time.monotonic() - job.began_at:.0f} s", by="progress")


@pain(13, "a load that stands still", r"stood still for \d+ s while loading weights")
def stuck_load(site: Site) -> Seen:
    """Loading stops after the first of five files."""
    return site.failed(site.submit("stuck", "--stub-hang-loading", env={"HPC_SERVE_STALL_S": "10"}, **ONE_NODE))


@pain(14, "every rank reads all of the weights over the network", r"prefetch: .* on fuse\.sshfs", how="stand-in")
def network_weights(site: Site) -> Seen:
    """The model lies on a filesystem of FUSE that calls itself sshfs: the launcher has it read ahead, once a node."""
    folder = site.alice.home / "far"
    site.alice.run("mkdir", str(folder))
    mount = ("bindfs", "-o", "allow_other,subtype=sshfs", str(site.model), str(folder))
    with site.changed("n1", mount, ("umount", "-l", str(folder))):
        options = ("--nodelist=n1",)
        job = site.submit("network-weights", options=options, env={"HPC_SERVE_MODEL": str(folder)}, **ONE_NODE)
        site.ready(job)
        said = next((line for line in site.node_log(job).splitlines() if "loading weights: " in line), "(nothing)")
        return _cured(job, said.partition("loading weights: ")[2] or said, by="the launcher")


@pain(15, "nodes that would stay idle", r"a whole node would stay idle")
def idle_nodes(site: Site) -> Seen:
    """A job of two nodes whose script was changed by hand to an engine of one rank."""
    edit = replaced("--pipeline-parallel-size 2", "--pipeline-parallel-size 1")
    return site.failed(site.submit("idle-nodes", edit=edit, **RAY))


@pain(16, "no Ray in the environment", r"\bray\b")
def no_ray(site: Site) -> Seen:
    """The environment has no `ray`, and the script asks for it."""
    env = site.environment("no-ray", path="/usr/bin:/bin", programs={})
    return site.failed(site.submit("no-ray", env=env, **RAY))


@pain(17, "fewer GPUs than the engine uses", r"more GPUs than the job has")
def few_gpus(site: Site) -> Seen:
    """#SBATCH asks for one GPU of a node, and the engine for two."""
    edit = replaced("#SBATCH --gpus-per-node=2", "#SBATCH --gpus-per-node=1")
    return site.failed(site.submit("few-gpus", edit=edit, **ONE_NODE, tensor_parallel_size=2))


@pain(19, "srun waits: another step holds the nodes", r"other steps of the job hold the resources")
def step_waits(site: Site) -> Seen:
    """Another step has all of the job, and srun was told to share nothing."""

    def edit(script: str) -> str:
        is_there = 'until squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%j | grep -q sleep; do :; done'
        nodes = 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
        greedy = f'{nodes} --exclusive --cpus-per-task="$SLURM_CPUS_PER_TASK" --mem=0 sleep 600 &\n{is_there}'
        return before_attempts(greedy)(script.replace("--overlap ", "--exclusive "))

    job = site.submit("step-waits", edit=edit, **MP)
    wait_for(lambda: "step creation" in site.script_log(job), 300, what="srun to wait")
    return site.doctor(job)


@pain(20, "signals do not reach the engine", r"stopped.*nothing is left")
def deaf_engine(site: Site) -> Seen:
    """scancel of an engine that ignores SIGTERM."""
    job = site.submit("deaf", "--stub-ignore-sigterm", **ONE_NODE)
    site.ready(job)
    began_at = time.monotonic()
    site.alice.cancel(job.job_id)
    site.alice.wait_until_gone(job.job_id)
    said = f"{site.status(job)['state']}, and nothing is left on any node"
    return Seen(said=said, by="the launcher", is_before_weights=None, seconds=time.monotonic() - began_at)


@pain(21, "compile caches race", r"a folder each")
def caches_apart(site: Site) -> Seen:
    """Two jobs of one model start at once on one node. That each has a folder of its own is looked up in its engine."""
    return _two_on_a_node(site, "caches", "VLLM_CACHE_ROOT", "a folder each")


@pain(22, "ports inside vLLM collide on one node", r"a port each", how="stand-in")
def ports_apart(site: Site) -> Seen:
    """The same of the port from which vLLM counts; the stub takes none of them."""
    return _two_on_a_node(site, "ports", "VLLM_PORT", "a port each")


@pain(23, "how many GPUs does it need", r"does not fit")
def too_large(site: Site) -> Seen:
    """405b is asked for on one node."""
    began_at = time.monotonic()
    done = site.alice.hpc_serve("submit", "405b", "--nodes", "1")
    said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
    return Seen(said=said, by="submit", is_before_weights=True, seconds=time.monotonic() - began_at)


@pain(24, "an engine open to everybody", r"401 .*certificate")
def stranger(site: Site) -> Seen:
    """Mallory asks alice's engine from another node, without a key, and without trusting her authority."""
    job = site.submit("open", **ONE_NODE)
    record = site.ready(job)
    url = f"https://{record['hosts'][0]}:{record['port']}/v1/models"
    curl = ("curl", "--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_code}")
    code = site.mallory.run(*curl, "--insecure", url, node="n3").stdout
    trust = site.mallory.run(*curl, url, node="n3").stderr.strip()
    return _cured(job, f"HTTP {code} without the key; {trust}", by="the gate")


@pain(25, "preemption", r"higher priority")
def preempted(site: Site) -> Seen:
    """A job of a lower partition, whose node a job of a higher one needs."""
    job = site.submit(
        "preempted",
        **ONE_NODE,
        options=("--partition=lowprio", "--nodelist=n1", "--no-requeue"),
    )
    site.ready(job)
    script = site.alice.write("higher.sh", "#!/bin/bash\nsleep 60\n")
    began_at = time.monotonic()
    site.alice.sbatch(script, "--partition=gpu", "--nodelist=n1", "--exclusive", "--mem=0")
    wait_for(lambda: not site.alice.is_queued(job.job_id), 180, what="the preemption")
    return site.doctor(job, time.monotonic() - began_at)


@pain(0, "beside them: weights cut short", r"cut short|incomplete|damaged|shorter|bytes")
def cut_weights(site: Site) -> Seen:
    """A copy of the model whose only file of weights has lost its last byte."""
    folder = site.alice.home / "cut"
    site.alice.run("cp", "-r", str(site.model), str(folder))
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    return site.failed(site.submit("cut", env={"HPC_SERVE_MODEL": str(folder)}, **ONE_NODE))


@pain(0, "beside them: /dev/shm full", r"/dev/shm has 0\.\d of 1 MiB free")
def shm_full(site: Site) -> Seen:
    """A /dev/shm of 1 MiB with a file in it."""
    with site.small_disk("n1", "/dev/shm", "size=1m,mode=1777"):
        site.root("n1", "sh", "-c", "head -c 900000 /dev/zero > /dev/shm/left")
        return site.failed(site.submit("shm-full", **RAY))


@pain(0, "beside them: no room for temporary files", r"/tmp/small")
def disk_full(site: Site) -> Seen:
    """HPC_SERVE_TMPDIR is a disk of 64 KiB."""
    site.root("n1", "mkdir", "-p", "/tmp/small")
    with site.small_disk("n1", "/tmp/small", "size=64k,mode=1777"):
        return site.failed(site.submit("disk-full", env={"HPC_SERVE_TMPDIR": "/tmp/small"}, **ONE_NODE))


# -- what they share


def _cured(job: Job, said: str, *, by: str) -> Seen:
    return Seen(said=said, by=by, is_before_weights=None, seconds=time.monotonic() - job.began_at)


def _kill(site: Site, program: str) -> None:
    pids = [one for one in site.alice.processes() if one.argv and one.argv[0].endswith(program)]
    assert pids, f"no {program}"
    for one in pids:
        os.kill(one.pid, signal.SIGKILL)


def _two_on_a_node(site: Site, name: str, variable: str, said: str) -> Seen:
    jobs = [site.submit(f"{name}-{number}", options=("--nodelist=n1",), **ONE_NODE) for number in range(2)]
    for job in jobs:
        site.ready(job)
    values = {
        variable_of(process.pid, variable)
        for process in site.alice.processes()
        if "stub_engine.py" in " ".join(process.argv) and "hpc_serve.job" not in process.argv
    } - {None}
    return _cured(jobs[-1], said if len(values) == 2 else f"{len(values)} for two engines: {values}", by="the launcher")
