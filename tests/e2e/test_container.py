"""A service inside of an image, by Charliecloud and by Apptainer, on two nodes of a real Slurm.

The image is a folder with another Debian (tests/cluster/debian_root.sh, named by HPC_SERVE_IMAGE_BASE), its Python, and
hpc-serve; for Apptainer a SIF file of it, too. `make charliecloud` and `make apptainer` have all of it. Elsewhere these
tests are skipped, and say what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from tests.cluster import ClusterConfig, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.hosts import python_paths
from tests.e2e.jobs import STUB, User

BASE = os.environ.get("HPC_SERVE_IMAGE_BASE", "")
PROGRAMS = {"charliecloud": "ch-run", "apptainer": "apptainer"}
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not BASE, reason="HPC_SERVE_IMAGE_BASE names no folder with a Debian: `make charliecloud`"),
]
START_S = 600.0
SMALL = ("--mem", "4G", "--cpus-per-task", "2", "--no-exclusive")


@pytest.fixture(scope="module")
def image(cluster) -> Path:
    """A copy of the base with hpc-serve, the stub as its `vllm`, and folders for what is bound into it."""
    folder = cluster.shared / "image"
    subprocess.run(["cp", "--archive", "--reflink=auto", BASE, folder], check=True)
    packages = folder / "usr" / "lib" / "python3" / "dist-packages"
    shutil.rmtree(packages / "filelock", ignore_errors=True)  # Debian's own is older than what hpc-serve needs
    for package in (CHECKOUT / "hpc_serve", Path(filelock.__file__).parent):
        shutil.copytree(package, packages / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / "usr" / "local" / "bin"
    for program in (STUB, STUB.with_name("stub_refusals.py")):
        shutil.copy(program, folder / "usr" / "local" / program.name)
    (programs / "vllm").write_text('#!/bin/sh\nexec python3 /usr/local/stub_engine.py "$@"\n')
    (programs / "vllm").chmod(0o755)
    (programs / "python").symlink_to("/usr/bin/python3")
    make_place(folder, cluster.home("alice"))
    return folder


@pytest.fixture(params=PROGRAMS)
def runtime(request) -> str:
    """A runtime that the hosts have, as the site file names it."""
    program = (ClusterConfig().os_root or Path("/")) / "usr" / "bin" / PROGRAMS[request.param]
    if not program.exists():
        pytest.skip(f"there is no {program}: `make {request.param}` has it")
    return request.param


def make_place(image: Path, path: Path) -> None:
    """An empty folder or file in the image, over which `path` is bound."""
    place = image / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        place.touch()
    else:
        place.mkdir(exist_ok=True)


@pytest.fixture
def alice(cluster, alice_env):
    """Alice, who has no environment of Python but that of her login node."""
    user = User(cluster, {name: value for name, value in alice_env.items() if name != "HPC_SERVE_ENV"})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 180, what="the end of what a failed test left")


def submit_and_ask(alice: User, site: Path, *words: str) -> dict:
    """The service `boxed`, once it has answered; its record as `status` shows it."""
    done = alice.hpc_serve("submit", *words, "--name", "boxed", "--site", str(site), *SMALL, "--wait", timeout=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = alice.hpc_serve("chat", "boxed", "Why is the sky blue?")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    jobs = json.loads(alice.hpc_serve_said("status", "boxed", "--json"))["services"]  # one that ended may be shown, too
    (ready,) = [job for job in jobs if job["state"] == "ready"]
    return ready


def stop(alice: User) -> None:
    assert "is over: stopped" in alice.hpc_serve_said("stop", "boxed")
    wait_for(lambda: not alice.processes(), 180, what="no process left")


def test_an_engine_on_two_nodes_runs_in_the_image_with_its_python(alice, image, runtime):
    site = alice.write("image-site.yaml", f"{runtime}: {image}\ngpus_per_node: 2\n")
    serve_on_two_nodes(alice, site, image)


def test_an_engine_on_two_nodes_runs_in_an_image_file(alice, image, runtime):
    """Root builds the file, since the folder has files of several owners; its name is one that a shell would read."""
    if runtime != "apptainer":
        pytest.skip("a file of Charliecloud is not built here")
    file = alice.home / """it's $(cd; touch read) "an" image.sif"""
    build = ("apptainer", "build", "--mksquashfs-args", "-comp lz4", str(file), str(image))
    built = alice.cluster.run(build, user="root", timeout=START_S)
    assert built.returncode == 0, built.stderr
    site = alice.write("file-site.yaml", f"apptainer: {json.dumps(str(file))}\ngpus_per_node: 2\n")
    serve_on_two_nodes(alice, site, image)
    assert not (alice.home / "read").exists()


def serve_on_two_nodes(alice: User, site: Path, image: Path) -> None:
    layout = ("--nodes", "2", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--backend", "mp")
    status = submit_and_ask(alice, site, "70b", *layout)
    assert len(status["nodes"]) == 2
    engines = [process for process in alice.processes() if "/usr/local/stub_engine.py" in process.argv]
    assert {process.host for process in engines} == {node["name"] for node in status["nodes"]}
    theirs = {(Path(f"/proc/{process.pid}/exe").resolve().name) for process in engines}
    assert theirs == {(image / "usr" / "bin" / "python3").resolve().name}
    stop(alice)


def test_an_image_without_hpc_serve_gives_a_sentence(alice, image, runtime):
    empty = alice.home / "empty"
    assert alice.run("mkdir", "-p", str(empty)).returncode == 0
    bind = f"{empty}:/usr/lib/python3/dist-packages"
    site = alice.write("bare-site.yaml", f"{runtime}: {image}\nbinds: [{bind}]\n")
    words = ("submit", "8b", "--name", "bare", "--site", str(site), *SMALL, "--wait")
    done = alice.hpc_serve(*words, timeout=START_S)
    assert done.returncode != 0
    assert "the job's Python has no module hpc_serve" in done.stdout + done.stderr


@pytest.mark.engine
def test_real_vllm_runs_in_the_image_with_the_environment_bound_into_it(alice, image, runtime, tiny_models):
    """Python with the engine is bound; the C library, the shell and all else are the image's."""
    parts = [*python_paths([CHECKOUT, Path(sys.prefix)]), *dict.fromkeys((CHECKOUT, Path(sys.prefix)))]
    binds = [str(part) for part in parts if not any(part != one and part.is_relative_to(one) for one in parts)]
    for part in binds:
        make_place(image, Path(part))
    site = alice.write("bound-site.yaml", f"{runtime}: {image}\nbinds: {json.dumps(binds)}\n")
    # A copy of her own: in the image root is nobody, whose words beside a model are not taken.
    copied = alice.run("cp", "--recursive", str(tiny_models / "8b"), str(alice.home / "8b"))
    assert copied.returncode == 0, copied.stderr
    model = {"HPC_SERVE_MODEL": str(alice.home / "8b")}
    bound = User(alice.cluster, {**alice.environ, **model})
    status = submit_and_ask(bound, site, "8b")
    assert status["stand_in"]
    stop(bound)
