"""The one direction: planning and rendering can be imported where processes, sockets and engines cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COVERED

PLAN = Path(__file__).parents[2] / "hpc_serve" / "plan"
FORBIDDEN = (
    "subprocess",
    "socket",
    "http",
    "asyncio",
    "ray",
    "vllm",
    "torch",
    "numpy",
    "openai",
    "submitit",
    "filelock",
)
PURE = (
    "hpc_serve.errors",
    "hpc_serve.sizes",
    "hpc_serve.hub.needed_files",
    "hpc_serve.rendezvous.names",
    "hpc_serve.submit.request.bounds",
    "hpc_serve.submit.request.chain",
    "hpc_serve.submit.services.jobs",
    "hpc_serve.submit.services.load",
    "hpc_serve.submit.services.machines",
    "hpc_serve.submit.services.reconcile",
    "hpc_serve.submit.plans.planned_speed",
    "hpc_serve.submit.init.choose",
    "hpc_serve.submit.init.machine_facts",
    "hpc_serve.submit.init.setting",
    "hpc_serve.submit.init.slurm_facts",
    "hpc_serve.submit.request.job_env",
    "hpc_serve.submit.script.render",
    "hpc_serve.submit.request.request",
    "hpc_serve.submit.request.sbatch_options",
    "hpc_serve.submit.slurm.slurm_answers",
    "hpc_serve.submit.slurm.slurm_messages",
    "hpc_serve.submit.slurm.slurm",
    "hpc_serve.submit.script.template",
    "hpc_serve.submit.status.start_words",
    "hpc_serve.plan.catalog",
    "hpc_serve.vllm.allowed",
    "hpc_serve.vllm.arguments",
    "hpc_serve.vllm.command",
    "hpc_serve.vllm.load_strategy",
    "hpc_serve.vllm.log",
    "hpc_serve.vllm.options",
    "hpc_serve.vllm.report_line",
    "hpc_serve.vllm.start_progress",
    *sorted(".".join(path.relative_to(PLAN.parents[1]).with_suffix("").parts) for path in PLAN.rglob("*.py")),
)
# A finder that comes first and refuses; what the interpreter itself has loaded already does not count.
GUARD = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError(name + " is forbidden here")
for name in list(sys.modules):
    if name.split(".")[0] in {forbidden!r}:
        del sys.modules[name]
sys.meta_path.insert(0, Refuse())
import {module}
"""


@pytest.mark.parametrize("module", PURE)
def test_pure_code_imports_nothing_with_an_effect(module):
    code = GUARD.format(forbidden=FORBIDDEN, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_guard_itself_refuses():
    code = GUARD.format(forbidden=FORBIDDEN, module="hpc_serve.job.machine.network")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "forbidden here" in done.stderr


def test_rendering_needs_no_engine_and_no_network():
    forbidden = ("ray", "vllm", "torch", "openai", "submitit", "httpx", "httpx2", "subprocess")
    code = GUARD.format(forbidden=forbidden, module="hpc_serve.submit.script.render")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


JOB_SIDE = (
    *("hpc_serve.job.launcher", "hpc_serve.job.prepare", "hpc_serve.gate.gate"),
    *("hpc_serve.job.ray.ray_nodes", "hpc_serve.job.ray.ray_start"),
)


@pytest.mark.parametrize("module", JOB_SIDE)
def test_the_in_job_program_runs_in_a_bare_container(module):
    """Only the standard library and filelock: an engine's image need not have click, jinja2, openai or submitit."""
    forbidden = ("click", "jinja2", "openai", "submitit", "httpx", "httpx2", "rich", "yaml", "pydantic", "ray", "vllm")
    code = GUARD.format(forbidden=forbidden, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_launcher_begins_with_few_modules():
    """Every node of a start waits for these imports. What a launcher needs later, or seldom, is imported there."""
    code = "import sys; from hpc_serve.job import __main__; print(*sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != COVERED}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    found = done.stdout.split()
    ours = [name for name in found if name.partition(".")[0] == "hpc_serve"]
    assert len(found) <= 294, found
    assert len(ours) <= 78, ours
    assert not {"hpc_serve.diagnose", "hpc_serve.trust", "hpc_serve.job.weights.staging"} & set(ours)
