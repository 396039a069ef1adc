"""The one direction: planning and rendering can be imported where processes, sockets and engines cannot."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COVERED

CHECKOUT = Path(__file__).parents[2]
FORBIDDEN = (
    *("subprocess", "socket", "http", "asyncio", "ray", "vllm", "torch", "numpy", "openai", "submitit", "filelock"),
)


# The client's package connects, whatever its modules do themselves.
OF_THE_CLIENT = ("hpc_serve.client.", "hpc_serve.submit.status.job_status")


def pure_modules() -> list[str]:
    """The modules that setup.cfg calls pure and that can be imported alone; of a package each of its modules."""
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    names = setup["importlinter:contract:pure"]["source_modules"].split()
    paths = [path for name in names for path in sorted((CHECKOUT / name.replace(".", "/")).rglob("*.py"))]
    names += [".".join(path.relative_to(CHECKOUT).with_suffix("").parts) for path in paths]
    return [name for name in names if not name.startswith(OF_THE_CLIENT)]


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
import {modules}
"""


def imported(forbidden: tuple[str, ...], *modules: str) -> subprocess.CompletedProcess[str]:
    """What a Python says that imports these modules where the others cannot be imported."""
    code = GUARD.format(forbidden=forbidden, modules=", ".join(modules))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_pure_code_imports_nothing_with_an_effect():
    done = imported(FORBIDDEN, *pure_modules())
    assert done.returncode == 0, done.stderr


def test_the_guard_itself_refuses():
    assert "forbidden here" in imported(FORBIDDEN, "hpc_serve.job.machine.network").stderr


def test_rendering_needs_no_engine_and_no_network():
    forbidden = ("ray", "vllm", "torch", "openai", "submitit", "httpx", "httpx2", "subprocess")
    done = imported(forbidden, "hpc_serve.submit.script.render")
    assert done.returncode == 0, done.stderr


JOB_SIDE = (
    *("hpc_serve.job.launcher", "hpc_serve.job.prepare", "hpc_serve.gate.gate"),
    *("hpc_serve.job.ray.ray_nodes", "hpc_serve.job.ray.ray_start"),
)


@pytest.mark.parametrize("module", JOB_SIDE)
def test_the_in_job_program_runs_in_a_bare_container(module):
    """Only the standard library and filelock: an engine's image need not have click, jinja2, openai or submitit."""
    forbidden = ("click", "jinja2", "openai", "submitit", "httpx", "httpx2", "rich", "yaml", "pydantic", "ray", "vllm")
    done = imported(forbidden, module)
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
