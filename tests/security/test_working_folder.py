"""A job that was submitted from a folder in which a stranger has put modules runs none of them, under any Python.

What is run is the script's own way of starting `prepare`. Python 3.10 has no safe path and would import from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError

SCRIPT = Path(__file__).parents[2] / "sbatch" / "8b.sh"
CHECKOUT = SCRIPT.parents[1]
HOSTILE = ("argparse", "filelock", "hpc_serve", "runpy", "shlex", "sitecustomize", "encodings", "usercustomize")


def find_python(version: str) -> str | None:
    """A Python on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))):
        if path and subprocess.run([path, "-c", "import ssl"], capture_output=True).returncode == 0:
            return path
    return None


@pytest.fixture(params=["3.10", "3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder for PATH, with `python` in it."""
    found = find_python(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} on this machine")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(found)
    return request.param


def start(folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What the script does up to `prepare`, in `folder`."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    # A stand-in: the tests' own may be of a version for newer Pythons than the one that is tried.
    (libraries / "filelock.py").write_text("class SoftFileLease: pass\n")
    lines = SCRIPT.read_text().splitlines()
    wanted = [line for line in lines if line.startswith(("export PYTHONSAFEPATH", "prepare="))]
    wanted += [line.strip() for line in lines if "exports=" in line]
    assert len(wanted) == 3
    environ = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{CHECKOUT}:{libraries}",
        "HPC_SERVE_HOME": str(tmp_path / "home"),
        "HPC_SERVE_CLUSTER": "local",
        "HPC_SERVE_JOB_ID": "local-1",
    }
    text = "\n".join(["set -euo pipefail", *wanted, 'echo "$exports"'])
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environ, capture_output=True, text=True)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules of a stranger's, which say that they ran."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nraise SystemExit(0)\n")
    return folder


@pytest.mark.usefixtures("python")
def test_a_folder_that_others_can_write_to_is_not_imported_from(hostile, tmp_path, python):
    hostile.chmod(0o777)
    done = start(hostile, tmp_path)
    assert not (tmp_path / "was-run").exists(), done.stderr
    if python == "3.10":
        assert done.returncode == InvalidRequestError.exit_code, done.stderr
        assert "the working folder" in done.stderr
        assert "can be changed by everybody" in done.stderr
        assert "Python 3.10 imports modules from it" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("python")
def test_a_folder_of_ones_own_is_used_under_every_python(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir(mode=0o755)
    done = start(folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "export HPC_SERVE_JOB_DIR=" in done.stdout


def test_what_python_3_10_does_without_the_scripts_care(hostile, tmp_path):
    """The danger is real: the plain way of starting a module imports the stranger's."""
    python = find_python("3.10")
    if python is None:
        pytest.skip("no Python 3.10 on this machine")
    subprocess.run([python, "-m", "hpc_serve.job.prepare"], cwd=hostile, env={"PYTHONSAFEPATH": "1"})
    assert (tmp_path / "was-run").exists()
