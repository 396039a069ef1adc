"""A model that loads from a throttled disk: what is said of the time left, beside the truth. `make slow-load`.

Local replicas of the real engine (`--stub`: of the stand-in, which reads the files alike) start one after another. The
model's folder is mounted through bindfs with a rate (FUSE). A load that is slow must become ready, one that stands
still must be ended with the place where it stood, and from half-way on what is said must be within half of the truth,
or ten seconds, where a start is known. How fast a disk is that was never seen so is known once the weights are read:
until then nothing is asked of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from hpc_serve.units import GIB, MIB
from hpc_serve.vllm.arguments import ARGS_FILE, read_args_file
from tests.cluster import wait_for
from tests.cluster.environment import ENGINE_ON_FEW_CORES
from tests.support.stubs import SCRIPT

SERVICE = "slow"
_MOST_S = 900.0
_FIRST_S = 10.0
_LAYER_BYTES = 119 * MIB


@dataclass(frozen=True)
class Said:
    """What the record said so many seconds after the begin of a start."""

    at_s: float
    stage: str
    left_s: float | None
    weights_left_s: float | None


@dataclass
class Start:
    """One start: how it ended, what it took, and what was said meanwhile."""

    name: str
    record: EndpointRecord
    took_s: float
    said: list[Said] = field(default_factory=list)
    has_new_disk: bool = False

    def truth_of(self, one: Said) -> float:
        return self.took_s - one.at_s

    def is_right(self, one: Said) -> bool:
        truth_s = self.truth_of(one)
        return one.left_s is not None and abs(one.left_s - truth_s) <= max(truth_s / 2, 10.0)

    @property
    def late(self) -> list[Said]:
        """What was said from half-way on; on a disk as none was seen before, from ten seconds of its weights on."""
        late = [one for one in self.said if one.at_s >= self.took_s / 2]
        if self.has_new_disk:
            begin_s = next((one.at_s for one in self.said if one.stage == "weights"), self.took_s)
            late = [one for one in late if one.at_s >= begin_s + _FIRST_S]
        return late

    @property
    def share_right(self) -> float | None:
        """None where no start was known to go by."""
        told = [one for one in self.late if one.left_s is not None]
        return sum(map(self.is_right, self.late)) / len(self.late) if told else None

    @property
    def weights_share_right(self) -> float | None:
        """The same of the weights' own time left, once half of it is over."""
        found = [one for one in self.said if one.stage == "weights"]
        if not found or self.record.start is None:
            return None
        begin_s = found[0].at_s
        end_s = begin_s + self.record.start.took_s.get("weights", 0.0)
        late = [one for one in found if one.at_s >= (begin_s + end_s) / 2]
        right = [
            one
            for one in late
            if one.weights_left_s is not None
            and abs(one.weights_left_s - (end_s - one.at_s)) <= max((end_s - one.at_s) / 2, 10.0)
        ]
        return len(right) / len(late) if late else None


def split_weights(folder: Path, files: int) -> None:
    """Parts the only file of weights into several of about the same size."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors, index = load_file(whole), dict[str, str]()
    for number in range(files):
        part = {name: tensors[name] for name in list(tensors)[number::files]}
        path = folder / f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        index |= dict.fromkeys(part, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    whole.unlink()


class Disk:
    """The model's folder, mounted with a given rate."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self._bindfs: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def throttled(self, rate: int | None) -> Iterator[None]:
        """Mount it: files come at `rate` bytes/s; None: as they can."""
        self.folder.mkdir(exist_ok=True)
        limit = [f"--read-rate={rate}"] if rate else []
        self._bindfs = subprocess.Popen(["bindfs", "-f", *limit, str(self.source), str(self.folder)])
        try:
            wait_for(lambda: os.path.ismount(self.folder), 60, what="the mount")
            yield
        finally:
            self.go_on()
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
            self._bindfs.terminate()  # a mount namespace that began meanwhile may hold its mount
            self._bindfs.wait()

    def stop(self) -> None:
        """Nothing comes any more."""
        assert self._bindfs is not None
        self._bindfs.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a process that waits for the disk end."""
        assert self._bindfs is not None
        self._bindfs.send_signal(signal.SIGCONT)


class Starts:
    """The replicas that are started, in one home, so that each start knows of those before."""

    def __init__(self, folder: Path, disk: Disk, *, stub: bool) -> None:
        self._folder, self._disk, self._stub = folder, disk, stub
        self._store = ServiceStore(folder / "home")
        self.done: list[Start] = []

    def run(self, name: str, rate: int | None, *, stops_at: float | None = None, stall_s: int = 60) -> Start:
        """Start a replica and follow it; `stops_at` is the part of the weights after which the disk stands still."""
        with self._disk.throttled(rate):
            script = self._script()
            environ = {key: value for key, value in os.environ.items() if not key.startswith("HPC_SERVE_")}
            environ |= {**ENGINE_ON_FEW_CORES, "HPC_SERVE_HOME": str(self._store.home), "HPC_SERVE_CACHE_SIZE": "0"}
            environ |= {"HPC_SERVE_STALL_S": str(stall_s), "HPC_SERVE_LOG_DIR": str(self._folder / "logs")}
            environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
            with (self._folder / "log").open("a") as log:
                job = subprocess.Popen(
                    ["bash", str(script)],
                    env=environ,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                start = self._follow(name, f"local-{job.pid}", job, stops_at)
            finally:
                self._disk.go_on()
                job.terminate()
                job.wait(120)
        self.done.append(start)
        return start

    def _script(self) -> Path:
        request = ServeRequest(
            model=str(self._disk.folder),
            service=SERVICE,
            gpu="cpu",
            gpu_memory_bytes=4 * GIB,
            cluster="local",
            engine_args=(*read_args_file((self._disk.source / ARGS_FILE).read_text()), *self._stub_words()),
            allow_unknown_vllm_options=self._stub,
            environment=Environment(kind="none"),
        )
        text = render_script(request, plan_service(request))
        if self._stub:
            text = text.replace("vllm serve", f"{sys.executable} {SCRIPT} serve")
        script = self._folder / "script.sh"
        script.write_text(text)
        return script

    def _stub_words(self) -> tuple[str, ...]:
        return ("--stub-map-weights",) if self._stub else ()

    def _follow(self, name: str, job_id: str, job: subprocess.Popen[bytes], stops_at: float | None) -> Start:
        began_s, said = time.time(), list[Said]()
        while time.time() - began_s < _MOST_S:
            record = next((one for one in self._store.read(SERVICE).records if one.job_id == job_id), None)
            now_s = time.time()
            if record is not None and record.state != "starting":
                return Start(name, record, (record.state_since if record.state == "ready" else now_s) - began_s, said)
            if record is not None and record.start is not None:
                age_s, start = now_s - record.updated_at, record.start
                said.append(
                    Said(
                        now_s - began_s,
                        start.stage,
                        None if start.time_left_s is None else max(0.0, start.time_left_s - age_s),
                        None if start.weights_left_s is None else max(0.0, start.weights_left_s - age_s),
                    )
                )
                if stops_at is not None and start.stage == "weights" and self._seconds_in_weights(said) > stops_at:
                    self._disk.stop()
                    stops_at = None
            if job.poll() is not None:
                raise SystemExit(f"the job ended: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(1)
        raise SystemExit(f"{name}: neither ready nor failed after {_MOST_S:.0f} s")

    @staticmethod
    def _seconds_in_weights(said: list[Said]) -> float:
        return sum(one.stage == "weights" for one in said)


def show(start: Start) -> None:
    print(f"\n{start.name}: {start.record.state} after {start.took_s:.0f} s")
    if start.record.state != "ready":
        print(f"  {start.record.reason}")
        return
    print(f"  {'at':>6} {'stage':<10} {'truth':>6} {'said':>6}   of the weights alone")
    step = max(1, len(start.said) // 16)
    for one in start.said[::step]:
        left = "" if one.left_s is None else f"{one.left_s:.0f}"
        weights = "" if one.weights_left_s is None else f"{one.weights_left_s:.0f}"
        mark = "" if one.at_s < start.took_s / 2 or one.left_s is None or start.is_right(one) else "  off"
        print(f"  {one.at_s:6.0f} {one.stage:<10} {start.truth_of(one):6.0f} {left:>6} {weights:>6}{mark}")
    if (share := start.share_right) is not None:
        print(f"  right from half-way on: {share:.0%} of {len(start.late)}")
    if (share := start.weights_share_right) is not None:
        print(f"  of the weights alone, from half of them on: {share:.0%}")


def forget_everything() -> bool:
    """Have the kernel drop its page cache, the engine's programs with it; whether it may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow_load", description=__doc__)
    parser.add_argument("--stub", action="store_true", help="the stand-in of the tests in place of vLLM")
    parser.add_argument("--mib-per-s", type=int, default=8, help="how fast it is [default: 8]")
    parser.add_argument("--layers", type=int, default=4, help=f"of {_LAYER_BYTES // MIB} MiB each [default: 4]")
    parser.add_argument("--files", type=int, default=1, help="of weights [default: 1]")
    parser.add_argument("--starts", type=int, default=5, help="only the first so many slow starts [default: all 5]")
    parser.add_argument("--folder", help="where the model is made [default: the temporary folder]")
    options = parser.parse_args()
    if not shutil.which("bindfs"):
        raise SystemExit("bindfs is not here: install it")
    rate = options.mib_per_s * MIB
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="slow-load-") as text:
        folder = Path(text)
        model = make_demo_model(
            folder / "model",
            num_hidden_layers=options.layers,
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=64,
            num_key_value_heads=16,
        )
        if options.files > 1:
            split_weights(model, options.files)
        starts = Starts(folder, Disk(model, folder / "disk"), stub=options.stub)
        all_starts = (
            (f"first start, {options.mib_per_s} MiB/s", rate, True),
            ("again", rate, False),
            ("a disk three times slower", rate // 3, True),
            ("again", rate // 3, False),
            (f"{options.mib_per_s} MiB/s once more", rate, True),
        )
        for name, its_rate, is_new in all_starts[: options.starts]:
            start = starts.run(name, its_rate)
            start.has_new_disk = is_new
            show(start)
        if not options.stub and options.starts >= len(all_starts) and forget_everything():
            show(starts.run(f"nothing in the page cache, {options.mib_per_s} MiB/s", rate))
            show(starts.run(f"in the page cache again, {options.mib_per_s} MiB/s", rate))
        stuck = starts.run("a disk that stands still", rate, stops_at=10, stall_s=30)
        show(stuck)
    slow = starts.done[:-1]
    killed = [start.name for start in slow if start.record.state != "ready"]
    wrong = [start.name for start in slow if start.share_right is not None and start.share_right < 1]
    named = "no progress for" in (stuck.record.reason or "") and "while loading weights" in (stuck.record.reason or "")
    print(f"\nended though slow: {', '.join(killed) or 'none'}; off from half-way on: {', '.join(wrong) or 'none'}")
    print(f"the one that stood still: {'ended, with its place' if named else 'WRONG'}")
    return 1 if killed or wrong or not named else 0


if __name__ == "__main__":
    sys.exit(main())
