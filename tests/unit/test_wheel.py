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


def test_the_wheel_holds_what_is_not_python(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {f"hpc_serve/templates/{path.name}" for path in (CHECKOUT / "templates").glob("*.j2")}
    assert packaged
    assert packaged <= names
    assert "hpc_serve/py.typed" in names
    assert {f"hpc_serve/plots/plan_page.{kind}" for kind in ("css", "html", "js")} <= names
    assert "hpc_serve/plots/figure.mplstyle" in names
    assert any(name.startswith("hpc_serve/plan/catalog/") and name.endswith(".json") for name in names)


def test_every_package_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hpc_serve").rglob("*.py")}
    assert modules <= names


def test_the_wheel_alone_renders_the_committed_script(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import hpc_serve, sys; sys.stderr.write(hpc_serve.__file__); from hpc_serve.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "render", "--model", "405b", "--nodes", "2"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) in done.stderr
    assert done.stdout == (CHECKOUT / "sbatch" / "405b.sh").read_text()
