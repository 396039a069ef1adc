"""What a start costs: `python -m benchmarks.start`, as root. Two minutes a round, with a Slurm and hosts of its own.

Ours beside the batch scripts that people would use in its place (`start_scripts/`), in turns. The clock runs from a
script's first line: for ours to the ready record, for the others to the first completion, asked for every 50 ms on the
first node. A stub that is up in 0.1 s takes the engine's place, so that what is left is everything else; `--real`
starts vLLM on CPUs with a tiny model. All hosts share this machine's cores: Ray's own work on N nodes takes N times
as long as on one, so the growth over nodes is an upper bound. With `--cores-per-node` each node has the same share of
a core, however many there are (`tests/cluster/cpu_shares.py`), and the growth is what nodes of their own would show,
as long as all shares fit into this machine; then the CPU of the nodes is counted too. Where strace is installed, and
without shares, one more start of each size counts what the launchers send, wait for and do to files (`start_calls`).
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import start_calls
from benchmarks.common import Benchmark, Figures, Measured, run_alone, show
from hpc_serve.demo_model import make_demo_model
from hpc_serve.vllm.arguments import ARGS_FILE
from tests.cluster import ClusterConfig, SlurmCluster, wait_for
from tests.cluster.cpu_shares import CpuShares, NoCpuControllerError, cpu_shares
from tests.cluster.environment import user_environment, visible_folders
from tests.e2e.jobs import STUB, User, layout_script, stub_script

SCRIPTS = Path(__file__).with_name("start_scripts")
PORT = 8000
WITHIN_S, GRACE_S = 300.0, 20.0
MODEL_NAME = "start"
STARTS = ("ours", "ours-mp", "symmetric_run", "sleeps", "fastest", "bare")
GROWN = ("ours", "ours-mp", "fastest")

ASK = """
import json, sys, time, urllib.request
print("waits", flush=True)
body = json.dumps({"model": sys.argv[2], "prompt": "1", "max_tokens": 1}).encode()
ends_at = time.time() + float(sys.argv[3])
request = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
while True:
    try:
        if urllib.request.urlopen(request, timeout=600).status == 200: break
    except OSError as error:
        if time.time() > ends_at: raise
        time.sleep(0.05)
print(time.time(), flush=True)
"""
CONNECT = """
import sys, time
import openai.resources.chat, openai.resources.completions
from hpc_serve.client import connect
print("waits", flush=True)
client = connect(sys.argv[1], wait=float(sys.argv[2]))
print(time.time(), flush=True)
client.close()
"""


class StartFailedError(Exception):
    """A start came to nothing. The text is what it said."""


@dataclass(frozen=True)
class Start:
    """One start. `connected_s` is from the ready record to the return of a client's `connect()` that waited for it.

    `cpu_s` has seconds of CPU until then, of the first node and of each other one, where they are counted.
    """

    seconds: float
    connected_s: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> Figures:
        connected = {} if self.connected_s is None else {"ready to connect(), s": self.connected_s}
        return {"start, s": self.seconds, **connected, **self.cpu_s}


class Bench:
    """Starts on a cluster that is up. `model` is the folder of a tiny model, None for the stub.

    With `shares` each node has `cores` from a job's submission to the answer, and all there are while it is ended.
    """

    def __init__(
        self, cluster: SlurmCluster, model: Path | None, shares: CpuShares | None = None, cores: float | None = None
    ) -> None:
        self._cluster, self._model = cluster, model
        self._shares, self._cores = shares, cores
        self._alice = User(cluster, {**user_environment(), "SCRIPTS": str(SCRIPTS), "GPUS": "1"})
        self._count = 0

    def counted(self, name: str, nodes: int) -> Figures:
        """What the launchers of one start of ours did, all nodes together."""
        folder = self._alice.home / f"calls-{self._count + 1}"
        self._alice.run("mkdir", str(folder))
        self.start(name, nodes, calls=folder)
        home = str(self._alice.home / ".hpc-serve")
        counts = [start_calls.count(path.read_text(errors="replace").splitlines(), home) for path in folder.iterdir()]
        kinds = (start_calls.MESSAGES, start_calls.WAITS, start_calls.FILES)
        return {kind: float(sum(one[kind] for one in counts)) for kind in kinds}

    def start(self, name: str, nodes: int, *, calls: Path | None = None) -> Start:
        """One start of one kind; when it returns nothing of it is left. `calls`: where its launchers' calls go."""
        self._count += 1
        is_ours = name.startswith("ours")
        began_file = self._alice.home / f"began-{self._count}"
        log = self._alice.home / f"log-{self._count}.out"
        words = self._our_words(name, nodes, calls) if is_ours else self._their_words(name, nodes)
        waiting = self._begin_to_wait(is_ours)
        assert waiting.stdout is not None
        try:
            assert waiting.stdout.readline() == "waits\n", waiting.stdout.read()
            before = self._limit(self._cores)
            job_id = self._submit([f"--output={log}", *words], {"BEGAN_FILE": str(began_file)})
            try:
                try:
                    said = waiting.stdout.read()  # nobody else looks meanwhile: every look takes some of the cores
                finally:
                    after = self._limit(None)
                answered_at = _number(said, log)
                record = self._alice.record(self._service, job_id) if is_ours else None
            finally:
                self._clear_up(job_id)
        finally:
            waiting.kill()
            waiting.wait()
        began_at = float(began_file.read_text())
        used_s = [after[node] - before[node] for node in self._cluster.nodes[:nodes] if node in before]
        cpu_s = cpu_of_nodes(used_s)
        if record is None:
            return Start(answered_at - began_at, cpu_s=cpu_s)
        ready_at = float(record["state_since"])
        return Start(ready_at - began_at, answered_at - ready_at, record["start"]["took_s"], cpu_s)

    def _limit(self, cores: float | None) -> Mapping[str, float]:
        """What each node has used so far, after which each has so many cores."""
        if self._shares is None:
            return {}
        used_s = self._shares.used_s()
        self._shares.limit(cores)
        return used_s

    @property
    def _service(self) -> str:
        return f"start-{self._count}"

    def _begin_to_wait(self, is_ours: bool) -> subprocess.Popen[str]:
        """A program that prints when the service of this start answered; it has imported all it needs beforehand."""
        if is_ours:
            argv = [sys.executable, "-c", CONNECT, self._service, str(WITHIN_S)]
            return self._cluster.popen(argv, env=self._alice.environ)
        argv = [sys.executable, "-c", ASK, f"http://127.0.0.1:{PORT}", MODEL_NAME, str(WITHIN_S)]
        return self._cluster.popen(argv, node=self._cluster.nodes[0])

    def _our_words(self, name: str, nodes: int, calls: Path | None) -> list[str]:
        sizes: dict[str, Any] = {"tensor_parallel_size": nodes, "num_nodes": nodes}
        sizes["backend"] = "mp" if name == "ours-mp" else "ray"
        make = layout_script if self._model is not None else stub_script
        first = "set -euo pipefail\n"
        model = f"export HPC_SERVE_MODEL={shlex.quote(str(self._model))}\n" if self._model is not None else ""
        text = make(self._service, **sizes).replace(first, f'date +%s.%N >"$BEGAN_FILE"\n{first}{model}', 1)
        if calls is not None:
            launcher = "python -m hpc_serve.job"
            text = text.replace(launcher, start_calls.traced(launcher, f"{calls}/$SLURM_NODEID"), 1)
        return [str(self._alice.write(f"{self._service}.sh", text))]

    def _their_words(self, name: str, nodes: int) -> list[str]:
        count = 1 if name == "bare" else nodes
        gate = ["--gate"] if name == "fastest" and self._model is None else []
        return [
            *(f"--nodes={count}", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=4", "--mem=4G"),
            *(str(SCRIPTS / f"{name}.sh"), *gate, "--", *self._engine(name, nodes)),
        ]

    def _submit(self, words: Sequence[str], environ: Mapping[str, str]) -> str:
        done = self._alice.run("sbatch", "--parsable", *words, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _engine(self, name: str, nodes: int) -> list[str]:
        if self._model is None:
            return [sys.executable, str(STUB), "serve", "model", "--served-model-name", MODEL_NAME, f"--port={PORT}"]
        executor = "mp" if name == "bare" else "ray"
        sizes = [f"--tensor-parallel-size={nodes}", f"--distributed-executor-backend={executor}"]
        words = shlex.split((self._model / ARGS_FILE).read_text(), comments=True)
        return ["vllm", "serve", str(self._model), "--served-model-name", MODEL_NAME, f"--port={PORT}", *sizes, *words]

    def _clear_up(self, job_id: str) -> None:
        """Until nothing of the job is left; what a script leaves behind is ended."""
        self._alice.run("scancel", job_id)
        with suppress(TimeoutError):
            self._alice.wait_until_gone(job_id, GRACE_S)
        while left := self._alice.processes():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                wait_for(lambda: not self._alice.processes(), GRACE_S)
        wait_for(lambda: not self._alice.is_queued(job_id), WITHIN_S, what=f"the end of job {job_id}")


def cpu_of_nodes(used_s: Sequence[float]) -> dict[str, float]:
    """Seconds of CPU of the first node, and what each other one has used in the mean.

    >>> cpu_of_nodes([5.0, 1.0, 3.0])
    {'CPU of the first node, s': 5.0, 'CPU of each other node, s': 2.0}
    """
    if not used_s:
        return {}
    first, *others = used_s
    found = {"CPU of the first node, s": first}
    return found | ({"CPU of each other node, s": sum(others) / len(others)} if others else {})


def _number(said: str, log: Path) -> float:
    """The time that was said. Raises StartFailedError."""
    try:
        return float(said)
    except ValueError:
        raise StartFailedError(said + (log.read_text() if log.exists() else "")) from None


@contextmanager
def cluster_of(nodes: int) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(ClusterConfig(name=f"bench-{os.getpid()}", num_nodes=nodes, visible=visible_folders()))
    cluster.up()
    try:
        yield cluster
    finally:
        cluster.down()


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with cluster_of(max(options.nodes)) as cluster:
        if options.cores_per_node is None:
            _measure_on(cluster, None, options, measured)
            return
        try:
            with cpu_shares(cluster) as shares:
                _measure_on(cluster, shares, options, measured)
        except NoCpuControllerError as error:
            sys.exit(f"{error}. Without --cores-per-node all nodes share this machine's cores.")


def _measure_on(
    cluster: SlurmCluster, shares: CpuShares | None, options: argparse.Namespace, measured: Measured
) -> None:
    first = options.nodes[0]
    model = make_demo_model(cluster.shared / "model", like="405b") if options.real else None
    bench = Bench(cluster, model, shares, options.cores_per_node)

    def turn(name: str, nodes: int) -> Figures:
        start = bench.start(name, nodes)
        show(f"{name} on {nodes} nodes: {start}")
        return start.figures

    engine = "vLLM on CPUs" if options.real else "stub"
    if shares is not None:
        engine += f", {options.cores_per_node:g} cores a node"
    if shares is None or len(options.nodes) == 1:
        turns = {name: functools.partial(turn, name, first) for name in options.starts}
        base = next((name for name in ("fastest", *options.starts) if name in options.starts), "")
        measured.take_turns(f"{first} nodes, {engine}", turns, rounds=options.rounds, base=base, warm=False)
    for name in options.starts if len(options.nodes) > 1 else ():
        if name in GROWN:
            grown = {f"{nodes} nodes": functools.partial(turn, name, nodes) for nodes in options.nodes}
            case = f"{name} over nodes, {engine}"
            measured.take_turns(case, grown, rounds=options.rounds, base=f"{first} nodes", warm=False)
    if shares is not None:
        return
    ours = [name for name in options.starts if name.startswith("ours")]
    if ours and not shutil.which("strace"):
        measured.notes.append("strace is not installed: calls were not counted.")
        return
    for name in ours:
        for nodes in options.nodes:
            case = f"{name}, all launchers until the service is stopped"
            measured.add(case, f"{nodes} nodes", {kind: [n] for kind, n in bench.counted(name, nodes).items()})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="vLLM on CPUs in place of the stub; a minute a start")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2], help="2 4 8 16: the growth over nodes, too")
    parser.add_argument("--cores-per-node", type=_cores, metavar="N", help="the same for every node, such as 0.1")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))


def _cores(text: str) -> float:
    cores = float(text)
    if not 0 < cores < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of cores")
    return cores


BENCHMARK = Benchmark(
    name="start", about=__doc__, measure=measure, rounds=3, options=add_options, needs="root, and Slurm's daemons"
)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is taken down
    run_alone(BENCHMARK)
