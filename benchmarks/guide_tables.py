"""The tables of two guides, by their commands in docs/guides/measure.md: `python -m benchmarks.guide_tables > FILE.md`.

It shows the commands and what they print, on one small machine, so lengths and numbers of requests are smaller than the
guides'. The guide to vLLM on TPUs is asked of a tiny model, served by the real engine (vLLM on CPUs). The on-prem
guide's 1x8, 2x4 and 4x2 GPUs are seven stub engines, since so many real ones do not fit here: each answers at a tenth
of the times that `hpc-serve plan` expects of Llama 3.3 70B on so many A100, with as many requests at once.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.bench_against_vllm import ENGINE, real_service
from benchmarks.common import machine, variables, versions
from hpc_serve.demo_model import make_demo_model
from tests.support.stubs import StubService

LLAMA = "meta-llama/Llama-3.3-70B-Instruct"
TPU_GUIDE = (
    "hpc-serve bench llama-70b --lengths 1000/1000 --num-prompts 3000 --max-concurrency 64,128 --seed 100 --full"
)
TPU_GUIDE_HERE = TPU_GUIDE.replace("1000/1000", "100/100").replace("3000", "300")
ON_PREM_GUIDE = (
    "hpc-serve bench 70b-1x8 70b-2x4 70b-4x2 --split equally --dataset-name chat --lengths 2000/256,4000/256 "
    "--num-prompts 512 --max-concurrency 1,8,64,256"
)
ON_PREM_GUIDE_HERE = (
    ON_PREM_GUIDE.replace("/256", "/32")
    .replace("--num-prompts 512", "--num-prompts 64")
    .replace("1,8,64,256", "1,8,64")
)


@dataclass(frozen=True, kw_only=True)
class Stub:
    """Engines of one service: how many, how many requests each takes at once, and a tenth of the planned times."""

    service: str
    engines: int
    slots: int
    first_s: float
    token_s: float


# `hpc-serve plan --model 70b --gpu a100-80gb --nodes 1 -tp N --input-tokens 2000 --output-tokens 256`, its row of 16
# requests in flight (14 with two GPUs, which hold no more).
STUBS = (
    Stub(service="70b-1x8", engines=1, slots=16, first_s=0.049, token_s=0.0044),
    Stub(service="70b-2x4", engines=2, slots=16, first_s=0.086, token_s=0.0071),
    Stub(service="70b-4x2", engines=4, slots=14, first_s=0.16, token_s=0.0116),
)


@contextmanager
def stub_services(home: Path) -> Iterator[None]:
    with ExitStack() as at_end:
        for stub in STUBS:
            service = StubService(home, stub.service)
            at_end.callback(service.close)
            for _ in range(stub.engines):
                times = ("--stub-first-s", str(stub.first_s), "--stub-word-s", str(stub.token_s))
                words = ("--served-model-name", LLAMA, *times, "--stub-slots", str(stub.slots))
                service.start(*words, model=LLAMA, served_model_names=(LLAMA,))
        yield


def shown(title: str, command: str, asked: str) -> str:
    """A command of docs/guides/measure.md, the one that is run here, and what that prints."""
    argv = [sys.executable, "-m", "hpc_serve.cli", *shlex.split(asked)[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return f"## {title}\n\n```bash\n{command}\n```\n\nHere:\n\n```\n$ {asked}\n{done.stdout.rstrip()}\n```\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guide_tables", description=__doc__)
    parser.add_argument("--only", choices=["tpu", "on-prem"])
    options = parser.parse_args(words)
    found = machine()
    print("# The tables of two guides, each by one command\n")
    print(f"{str(__doc__).split(chr(10) * 2)[1].strip()}\n")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {found['cores']} cores of {found['cpu']}; ", end="")
    print("; ".join(f"{name} {version}" for name, version in versions().items() if name in ("hpc-serve", "vllm")), "\n")
    with tempfile.TemporaryDirectory() as root:
        home, model = Path(root) / "home", make_demo_model(Path(root) / "model", like="70b")
        with variables(**ENGINE, HPC_SERVE_HOME=str(home), HF_HOME=f"{root}/hf", COLUMNS="200"):
            if options.only != "on-prem":
                with real_service(home, str(model), "llama-70b"):
                    print(shown("vLLM on TPUs: 64 and 128 requests in flight", TPU_GUIDE, TPU_GUIDE_HERE), flush=True)
            if options.only != "tpu":
                with stub_services(home):
                    print(shown("On-prem: 1x8, 2x4 and 4x2 GPUs", ON_PREM_GUIDE, ON_PREM_GUIDE_HERE), flush=True)


if __name__ == "__main__":
    main()
