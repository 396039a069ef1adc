"""The built wheel, apart from the checkout: the templates are mapped into the package and the data comes along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hpc_serve", "templates")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        path = CHECKOUT / name
        if path.is_dir():  # without what other programs write there meanwhile
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(built), str(source)], check=True)
    return next(built.glob("hpc_serve-*.whl"))


def test_every_module_and_all_data_are_in_the_wheel(wheel):
    files = {
        str(path.relative_to(folder.parent))
        for folder in (CHECKOUT / "hpc_serve", CHECKOUT / "templates")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected = {f"hpc_serve/{name}" if name.startswith("templates/") else name for name in files}
    assert {"hpc_serve/templates/slurm.sh.j2", "hpc_serve/py.typed", "hpc_serve/demo_model.json"} <= expected
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_the_wheel_alone_renders_the_committed_script(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import hpc_serve, sys; sys.stderr.write(hpc_serve.__file__); from hpc_serve.cli.main import main; main()"
    words = [sys.executable, "-c", code, "render", "--model", "405b", "--nodes", "2"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(tmp_path) in done.stderr
    assert done.stdout == (CHECKOUT / "sbatch" / "405b.sh").read_text()
