"""What a user of the test cluster has: this checkout, the Python that runs this, and vLLM made fit for few cores.

The engine variables make a tiny engine start and answer quickly where sixteen ranks share two cores; a real site
sets none of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.cluster.cluster import PATH
from tests.cluster.config import CHECKOUT

ENGINE_ON_FEW_CORES = {
    "VLLM_RAY_ON_CPU": "1",  # tests/vllm_ray_on_cpu
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else each rank compiles small helpers at the first request, for 15 s
    "RAY_worker_niceness": "0",  # Ray's 15 starves the ranks wherever anything else runs
}


def user_environment() -> dict[str, str]:
    """The variables of a user whose programs come from the environment that this Python is of.

    PYTHONPATH too, where it was set for this one: it may name the checkout whose programs are to run.
    """
    ours = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    return {"PATH": f"{sys.prefix}/bin:{PATH}", "HPC_SERVE_ENV": sys.prefix, **ours, **ENGINE_ON_FEW_CORES}


def visible_folders() -> tuple[Path, ...]:
    """What users must reach of this machine: the checkout and the interpreter, wherever it is installed."""
    python = dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix)))
    return (CHECKOUT, *(folder for folder in python if not folder.is_relative_to(CHECKOUT)))
