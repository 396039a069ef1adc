"""A service inside of an image, by Charliecloud, Apptainer, podman-hpc and Pyxis, on two nodes of a real Slurm.

The image is a folder with another Debian (tests/cluster/debian_root.sh, named by HPC_SERVE_IMAGE_BASE), its Python, and
hpc-serve; for Apptainer a SIF file of it, too; podman-hpc has it in its store of squashed images, in the user's home;
Pyxis has a squashfs file. `make charliecloud`, `make apptainer`, `make podman-hpc` and `make pyxis` have all of it.
Elsewhere these tests are skipped, and say what is missing. HPC_SERVE_TRANSCRIPTS names a folder for what the user
typed and read.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.cluster import ClusterConfig, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment
from tests.cluster.hosts import python_paths
from tests.e2e.jobs import STUB, User

BASE = os.environ.get("HPC_SERVE_IMAGE_BASE", "")
PROGRAMS = {"charliecloud": "ch-run", "apptainer": "apptainer", "podman-hpc": "podman", "pyxis": "enroot"}
KEYS = {"podman-hpc": "podman_hpc"}
"""The setting of a site, where it is not called as the runtime is."""
PODMAN_HPC = CHECKOUT / ".venv-podman-hpc" / "bin"
PAUSE = ("/usr/bin/podman",)
"""It holds a user's namespaces on a node; podman leaves it there by design."""
IMAGE = "localhost/hpc-serve:test"
SKIPPED = ("  log ", "  next ", "      ", "  tools ", "  note ")
"""How lines of `submit` begin that are the same without an image, and not in a transcript."""
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not BASE, reason="HPC_SERVE_IMAGE_BASE names no folder with a Debian: `make charliecloud`"),
]
START_S = 600.0
SMALL = ("--mem", "4G", "--cpus-per-task", "2", "--no-exclusive")


@dataclass(frozen=True)
class Told(User):
    """A user whose commands of hpc-serve are kept, with what they said."""

    lines: list[str] = field(default_factory=list)

    def hpc_serve(self, *words: str, **options):
        done = super().hpc_serve(*words, **options)
        said = (done.stdout + done.stderr).strip().splitlines()
        told = (line for line in said if not line.startswith(SKIPPED))
        self.lines.append("\n".join((f"$ hpc-serve {shlex.join(words)}", *told, "")))
        return done

    def write_transcript(self, title: str) -> None:
        if folder := os.environ.get("HPC_SERVE_TRANSCRIPTS"):
            text = "\n".join(self.lines).replace(str(self.home), "~").replace(str(CHECKOUT), "CHECKOUT")
            (Path(folder) / f"{title}.txt").write_text(text)


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
    for part in bound_parts():
        make_place(folder, part)
    return folder


def bound_parts() -> list[Path]:
    """This checkout, its environment and its Python: what an image sees that has no engine of its own."""
    parts = [*python_paths([CHECKOUT, Path(sys.prefix)]), *dict.fromkeys((CHECKOUT, Path(sys.prefix)))]
    return [part for part in parts if not any(part != one and part.is_relative_to(one) for one in parts)]


@pytest.fixture(params=PROGRAMS)
def runtime(request) -> str:
    """A runtime that the hosts have, as the site file names it."""
    program = (ClusterConfig().os_root or Path("/")) / "usr" / "bin" / PROGRAMS[request.param]
    if not program.exists():
        pytest.skip(f"there is no {program}: `make {request.param}` has it")
    if request.param == "podman-hpc" and not PODMAN_HPC.exists():
        pytest.skip(f"there is no {PODMAN_HPC}: `make podman-hpc` has it")
    return request.param


@pytest.fixture(scope="module")
def squashed(cluster, image) -> Iterator[dict[str, str]]:
    """The image in the user's store of squashed images, as `podman-hpc migrate` makes it; what she sets to use it."""
    home, programs = cluster.home("alice"), cluster.shared / "podman"
    programs.mkdir()
    for name in ("podman-hpc", "fuse-overlayfs-wrap"):  # without the Python beside them
        (programs / name).symlink_to(PODMAN_HPC / name)
    env = {
        "PATH": f"{programs}:{user_environment()['PATH']}",
        "SQUASH_DIR": str(home / "squashed"),
        "PODMANHPC_MODULES_DIR": str(PODMAN_HPC.parent / "etc" / "podman_hpc" / "modules.d"),  # has --gpu
        "PODMANHPC_MKSQUASHFS_BIN": "/usr/bin/mksquashfs",  # a static one by default, which Debian has not
    }
    alice = User(cluster, env)
    archive = cluster.shared / "image.tar"
    pack = ("tar", "--owner=0", "--group=0", "--directory", image, "--create", "--file", archive, ".")
    subprocess.run(pack, check=True)  # one owner: an ordinary user without subordinate ids unpacks no other
    # What migrates starts a container of its own, without the words that podman-hpc gives to others.
    (programs / "containers.conf").write_text('[containers]\nnetns = "host"\n')
    without_network = {"CONTAINERS_CONF": str(programs / "containers.conf")}
    for words in (("import", str(archive), IMAGE), ("migrate", IMAGE)):
        done = alice.run("podman-hpc", *words, env=without_network, timeout=START_S)
        assert done.returncode == 0, done.stderr
    # podman 5 names a layer by its folder, podman-hpc 1.2.2 looks for the squashed file under its short name.
    for link in (home / "squashed" / "overlay").glob("*/link"):
        (link.parent / "diff.squash").symlink_to(f"../l/{link.read_text()}.squash")
    yield env
    for node in (None, *cluster.nodes):
        alice.run("podman-hpc", "system", "migrate", node=node)


@pytest.fixture(scope="module")
def squashfs_file(cluster, image) -> Path:
    """The image as one file, which Enroot unpacks on each node."""
    file = cluster.shared / "image.sqsh"
    packed = cluster.run(squash(image, file), user="root", timeout=START_S)
    assert packed.returncode == 0, packed.stderr
    return file


def squash(image: Path, file: Path) -> tuple[str, ...]:
    """The command that packs the image, without its devices: an ordinary user unpacks none."""
    return "mksquashfs", str(image), str(file), "-comp", "lz4", "-quiet", "-no-progress", "-wildcards", "-e", "dev/*"


@pytest.fixture
def in_image(request, alice, image, runtime) -> Callable[..., Path]:
    """Writes a site file that names the image, with further lines, as the runtime takes it."""
    if runtime == "podman-hpc":
        alice.environ.update(request.getfixturevalue("squashed"))
    name = IMAGE if runtime == "podman-hpc" else str(image)
    if runtime == "pyxis":
        name = str(request.getfixturevalue("squashfs_file"))
    return lambda *lines: alice.write(
        "image-site.yaml", "\n".join((f"{KEYS.get(runtime, runtime)}: {name}", *lines, ""))
    )


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
    user = Told(cluster, {name: value for name, value in alice_env.items() if name != "HPC_SERVE_ENV"})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not at_work(user), 180, what="the end of what a failed test left")


def at_work(alice: User) -> list[Any]:
    return [process for process in alice.processes() if process.argv != PAUSE]


def submit_and_ask(alice: User, site: Path, *words: str) -> dict:
    """The service `boxed`, once it has answered; its record as `status` shows it."""
    done = alice.hpc_serve("submit", *words, "--name", "boxed", "--site", str(site), *SMALL, "--wait", timeout=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = alice.hpc_serve("chat", "boxed", "Why is the sky blue?")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    said = User(alice.cluster, alice.environ).hpc_serve_said("status", "boxed", "--json")  # too long for a transcript
    jobs = json.loads(said)["services"]  # one that ended may be shown, too
    (ready,) = [job for job in jobs if job["state"] == "ready"]
    return ready


def stop(alice: User) -> None:
    assert "is over: stopped" in alice.hpc_serve_said("stop", "boxed")
    wait_for(lambda: not at_work(alice), 180, what="no process left")


def test_an_engine_on_two_nodes_runs_in_the_image_with_its_python(alice, image, runtime, in_image):
    serve_on_two_nodes(alice, in_image("gpus_per_node: 2"), image)
    alice.write_transcript(f"{runtime}-stub-two-nodes")


def test_an_engine_on_two_nodes_runs_in_an_image_file(alice, image, runtime):
    """Root builds the file, since the folder has files of several owners; its name is one that a shell would read."""
    file = alice.home / """it's $(cd; touch read) "an" image"""
    if runtime == "apptainer":
        words: tuple[str, ...] = ("apptainer", "build", "--mksquashfs-args", "-comp lz4", str(file), str(image))
    elif runtime == "pyxis":
        words = squash(image, file)
    else:
        pytest.skip("this runtime's image is no file that its setting names")
    built = alice.cluster.run(words, user="root", timeout=START_S)
    assert built.returncode == 0, built.stderr
    site = alice.write("file-site.yaml", f"{runtime}: {json.dumps(str(file))}\ngpus_per_node: 2\n")
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


def test_an_image_without_hpc_serve_gives_a_sentence(alice, in_image):
    empty = alice.home / "empty"
    assert alice.run("mkdir", "-p", str(empty)).returncode == 0
    bind = f"{empty}:/usr/lib/python3/dist-packages"
    site = in_image(f"binds: [{bind}]")
    words = ("submit", "8b", "--name", "bare", "--site", str(site), *SMALL, "--wait")
    done = alice.hpc_serve(*words, timeout=START_S)
    assert done.returncode != 0
    assert "the job's Python has no module hpc_serve" in done.stdout + done.stderr


ONE_NODE: tuple[str, ...] = ()
TWO_NODES = ("--nodes", "2", "--tensor-parallel-size", "1", "--pipeline-parallel-size", "2", "--backend")


@pytest.mark.engine
@pytest.mark.parametrize("layout", [ONE_NODE, (*TWO_NODES, "mp"), (*TWO_NODES, "ray")], ids=["one-node", "mp", "ray"])
def test_real_vllm_runs_in_the_image_with_the_environment_bound_into_it(alice, runtime, in_image, tiny_models, layout):
    """Python with the engine is bound; the C library, the shell and all else are the image's."""
    lines = ["gpus_per_node: 1", f"binds: {json.dumps([str(part) for part in bound_parts()])}"]
    if runtime == "pyxis":
        lines.append("container_options: [--container-env=PATH]")
    site = in_image(*lines)
    # A copy of her own: in the image root is nobody, whose words beside a model are not taken.
    copied = alice.run("cp", "--recursive", "--no-target-directory", str(tiny_models / "8b"), str(alice.home / "8b"))
    assert copied.returncode == 0, copied.stderr
    alice.environ["HPC_SERVE_MODEL"] = str(alice.home / "8b")
    # Charliecloud and podman-hpc take the PATH of outside by themselves.
    alice.environ["APPTAINERENV_PREPEND_PATH"] = f"{sys.prefix}/bin"
    status = submit_and_ask(alice, site, "8b", *layout)
    assert status["stand_in"]
    assert len(status["nodes"]) == (2 if layout else 1)
    assert bool([process for process in alice.processes() if "raylet" in process.argv[0]]) == ("ray" in layout)
    assert not [process for process in alice.processes() if any("stub_engine" in word for word in process.argv)]
    stop(alice)
    alice.write_transcript(f"{runtime}-vllm-{layout[-1] if layout else 'one-node'}")
