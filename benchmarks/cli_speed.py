"""How long the commands take that people wait for: `python -m benchmarks.cli_speed`. Three minutes; needs no engine.

`--help` (goal 0.15 s), `plan` (goal 0.3 s) and `status` with some numbers of services, each in a process of its own.
"warm" is the usual run. "cold" is the first on a node: the files of all modules are put out of the page cache before.
"no byte code" is the first by a user who may not write beside the modules, and every one with PYTHONDONTWRITEBYTECODE.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Benchmark, Figures, Measured, run_alone
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record, make_submitted

PLAN = ("plan", "--model", "70b", "--gpu", "h100-80gb")
WARM, COLD, NO_BYTE_CODE = "warm", "cold", "no byte code"
# What the modules of a command are, one file a line, after it has run.
_MODULES = """
import sys
from hpc_serve.cli.main import main
sys.argv[0] = "hpc-serve"
try:
    main()
except SystemExit:
    pass
for module in list(sys.modules.values()):
    for name in ("__file__", "__cached__"):
        if isinstance(found := getattr(module, name, None), str):
            print("MODULE", found)
"""


def make_services(home: Path, count: int) -> None:
    """Services whose jobs have ended, one record and one submitted job each."""
    store = ServiceStore(home)
    for number in range(count):
        fields = {"service": f"service-{number}", "job_id": str(1000 + number), "cluster": "local"}
        now = time.time()
        store.write(make_record(**fields, state="stopped", started_at=now - 600, updated_at=now - 300))
        store.write_submitted(make_submitted(**fields, submitted_at=now - 700))
        store.ensure_api_key(f"service-{number}")


class Command:
    """One command, with byte code in a folder of its own."""

    def __init__(self, words: tuple[str, ...], home: Path, cache: Path) -> None:
        self._words, self._cache = words, cache
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environ = {**plain, "HPC_SERVE_HOME": str(home), "PYTHONPYCACHEPREFIX": str(cache)}
        self._files = self._modules()

    def _modules(self) -> list[Path]:
        argv = [sys.executable, "-c", _MODULES, *self._words]
        done = subprocess.run(argv, env=self._environ, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        return [Path(line.removeprefix("MODULE ")) for line in lines if line.startswith("MODULE ")]

    def run(self) -> Figures:
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        argv = [sys.executable, "-m", "hpc_serve.cli", *self._words]
        subprocess.run(argv, env=self._environ, stdout=subprocess.DEVNULL, check=True)
        took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"s": took_s, "CPU s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}

    def run_cold(self) -> Figures:
        for file in self._files:
            if file.is_file():
                with file.open("rb") as found:
                    os.posix_fadvise(found.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self.run()

    def run_without_byte_code(self) -> Figures:
        shutil.rmtree(self._cache, ignore_errors=True)
        found = self.run()
        self.run()  # the next one has it again
        return found


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands: dict[str, tuple[tuple[str, ...], Path]] = {
            "`--help`": (("--help",), folder / "home"),
            "`plan`": (PLAN, folder / "home"),
        }
        for count in options.services:
            home = folder / f"home-{count}"
            make_services(home, count)
            commands[f"`status`, {count} services"] = (("status",), home)
        for number, (what, (words, home)) in enumerate(commands.items()):
            command = Command(words, home, folder / f"cache-{number}")
            turns = {WARM: command.run, COLD: command.run_cold, NO_BYTE_CODE: command.run_without_byte_code}
            chosen = {name: turns[name] for name in options.how}
            measured.take_turns(what, chosen, rounds=options.rounds, base=WARM)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--services", type=int, nargs="+", default=[0, 10, 100], help="how many `status` shows")
    parser.add_argument("--how", nargs="+", choices=[WARM, COLD, NO_BYTE_CODE], default=[WARM, COLD, NO_BYTE_CODE])


BENCHMARK = Benchmark(
    name="cli_speed",
    about=__doc__,
    measure=measure,
    rounds=9,
    options=add_options,
    short={"services": [2], "how": [COLD]},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
