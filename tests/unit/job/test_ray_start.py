"""The children that hold Ray and report its nodes, as programs of their own; Ray itself is a few lines of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.job.ray.ray_nodes import parse_line
from hpc_serve.job.ray.ray_private import COMMAND_LINE, missing_names
from tests.support.nodes import write_program

WITHIN_S = 120
OF_RAY = f"#!{sys.executable}\nfrom ray.scripts.scripts import main\nmain()\n"
SAYS = "import json, os, sys; print(json.dumps({'argv': sys.argv, 'environ': dict(os.environ)}))"
CLIENT = """
class Node:
    def __init__(self, address, state, **resources):
        self.node_manager_address, self.state, self.resources_total = address, state, resources

class GcsClient:
    looks = 0

    def __init__(self, address):
        self.address = address

    def get_all_node_info(self, timeout):
        GcsClient.looks += 1
        if GcsClient.looks == 1:
            raise RuntimeError("it does not listen yet")
        found = [Node("10.0.0.1", 0, GPU=8.0), Node("10.0.0.3", 1, GPU=8.0)]
        return dict(enumerate([*found, Node(self.address, 0)] if GcsClient.looks > 2 else found))
"""


def start(module: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name.startswith("COVER")} | variables
    return subprocess.Popen(
        [sys.executable, "-m", f"hpc_serve.job.ray.{module}", *words],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


MODULES = {
    "ray/scripts/scripts.py": f"def main():\n    {SAYS}\n    return 7\n",
    "ray/_private/ray_constants.py": 'RAY_START_HOOK = "RAY_START_HOOK"\n',
    "ray/_private/services.py": "def start_api_server(include_dashboard, raise_on_failure):\n    return 1, 2\n",
    "ray/_raylet.py": f'GCS_SERVER_PORT_NAME = "gcs_server_port"\n{CLIENT}\nInnerGcsClient = GcsClient\n',
}


def fake_ray(folder: Path, text: str = OF_RAY, **modules: str) -> Path:
    """A package of Ray with `modules` in place of its own, and its script as an installer writes it."""
    for name, code in {**MODULES, **modules}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(code)
    return write_program(folder / "bin" / "ray", text)


@pytest.mark.parametrize(
    ("script", "code"),
    [(OF_RAY, 7), (f"#!{sys.executable}\n{SAYS}; sys.exit(8)\n", 8)],
    ids=["in-process", "a-command"],
)
def test_ray_waits_for_its_words_and_has_exactly_the_environment_it_is_told(tmp_path, script, code):
    ray = fake_ray(tmp_path, script)
    child = start("ray_start", PATH=str(ray.parent), PYTHONPATH=str(tmp_path), ONLY_AT_FIRST="1")
    environ = {"PATH": str(ray.parent), "PYTHONPATH": str(tmp_path), "TOLD": "yes"}
    said, _ = child.communicate(
        json.dumps({"argv": ["ray", "start", "--block"], "environ": environ, "watch": []}) + "\n", timeout=WITHIN_S
    )
    told = json.loads(said)
    assert told["argv"][1:] == ["start", "--block"]
    assert told["environ"]["TOLD"] == "yes"
    assert "ONLY_AT_FIRST" not in told["environ"]
    assert child.returncode == code


HEAD = """
import importlib, json, os, types
from ray._private import services

def main():
    module, _, name = os.environ["RAY_START_HOOK"].rpartition(".")
    params = types.SimpleNamespace(ray_client_server_port=20002)
    getattr(importlib.import_module(module), name)(params, True)
    dashboard = services.start_api_server(False, raise_on_failure=False)
    print(json.dumps([params.ray_client_server_port, dashboard, os.environ.get("RAY_START_HOOK")]))
"""


def test_rays_head_starts_no_dashboard_and_no_server_for_ray_client(tmp_path):
    ray = fake_ray(tmp_path, **{"ray/scripts/scripts.py": HEAD})
    environ = {"PATH": str(ray.parent), "PYTHONPATH": str(tmp_path)}
    child = start("ray_start", **environ)
    order = {"argv": ["ray", "start"], "environ": environ, "watch": [str(tmp_path / "none"), "10.0.0.1", "GPU"]}
    said, _ = child.communicate(json.dumps(order) + "\n", timeout=WITHIN_S)
    assert json.loads(said) == [None, ["", None], None]


PUBLIC = """
def init(address, log_to_driver):
    nodes().append({"NodeManagerAddress": address, "Alive": True, "Resources": {"GPU": 4.0}})

def nodes(found=[{"NodeManagerAddress": "10.0.0.9", "Alive": False, "Resources": {}}]):
    return found

def shutdown():
    pass
"""


@pytest.mark.parametrize(
    ("module", "code", "missing"),
    [
        ("ray/_private/ray_constants.py", "", "ray._private.ray_constants.RAY_START_HOOK"),
        ("ray/_private/services.py", "", "ray._private.services.start_api_server"),
        ("ray/_raylet.py", "", "ray._raylet.GCS_SERVER_PORT_NAME, ray._raylet.GcsClient, ray._raylet.InnerGcsClient"),
        ("ray/scripts/scripts.py", "import ray.of_another_version", "No module named 'ray.of_another_version'"),
    ],
)
def test_a_ray_that_lacks_a_private_name_is_started_by_its_command(tmp_path, module, code, missing):
    """The log names it. `ray` is a program of its own here, which prints its arguments and waits for its nodes."""
    ray = fake_ray(tmp_path, **{module: code, "ray/__init__.py": PUBLIC})
    says = f"#!{sys.executable}\n{SAYS}; sys.stdout.flush(); sys.stdin.read()\n"
    command = write_program(tmp_path / "plain" / "ray", says)
    child = start("ray_start", PATH=str(ray.parent), PYTHONPATH=str(tmp_path))
    environ = {"PATH": str(command.parent), "PYTHONPATH": str(tmp_path)}
    watch = [str(tmp_path), "10.0.0.1", "GPU"]
    order = {"argv": ["ray", "start", "--head", "--port=0"], "environ": environ, "watch": watch}
    child.stdin.write(json.dumps(order) + "\n")
    child.stdin.flush()
    said: list[str] = []
    while not ('"argv"' in "".join(said) and any((parse_line(line) or (0, {}))[1] for line in said)):
        said.append(child.stdout.readline())
        assert said[-1], said
    child.stdin.close()
    assert child.wait(WITHIN_S) == 0
    assert missing in said[0]
    assert "the command `ray start` runs" in said[0]
    argv = next(json.loads(line)["argv"] for line in said if '"argv"' in line)
    (port, before), (_, nodes) = (found for line in said if (found := parse_line(line)))
    assert argv[1:] == ["start", "--head", f"--port={port}"]
    assert (before, nodes) == ({}, {f"10.0.0.1:{port}": 4})


def test_the_installed_ray_has_every_private_name_and_still_calls_what_is_patched():
    """A Ray that does not would start its unused servers, and listen on the port of Ray Client."""
    scripts = Path(pytest.importorskip(COMMAND_LINE).__file__).read_text()
    assert missing_names() == []
    assert "load_class(os.environ[ray_constants.RAY_START_HOOK])(ray_params, head)" in scripts
    node = Path(pytest.importorskip("ray._private.node").__file__).read_text()
    assert "self._webui_url, process_info = ray._private.services.start_api_server(" in node
    assert "if self._ray_params.ray_client_server_port:\n            self.start_ray_client_server()" in node


def test_of_rays_command_line_what_starts_ray_alone_is_imported():
    pytest.importorskip(COMMAND_LINE)
    code = "import sys; from hpc_serve.job.ray import ray_private as it; it.import_command_line(); print(*sys.modules)"
    environ = {"PATH": os.path.dirname(sys.executable)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert COMMAND_LINE in imported
    assert not {"ray.serve", "ray.util.state.state_cli", "fastapi"} & set(imported)


def test_it_ends_with_a_launcher_that_says_nothing(tmp_path):
    ray = fake_ray(tmp_path)
    child = start("ray_start", PATH=str(ray.parent), PYTHONPATH=str(tmp_path))
    assert child.communicate(timeout=WITHIN_S)[0] == ""
    assert child.returncode == 0


def test_the_port_and_every_change_of_the_nodes_are_printed_until_standard_input_is_closed(tmp_path):
    fake_ray(tmp_path)
    child = start("ray_nodes", str(tmp_path / "session"), "10.0.0.1", "GPU", PYTHONPATH=str(tmp_path))
    folder = tmp_path / "session" / "session_latest"
    folder.mkdir(parents=True)
    (folder / "port").write_text("4321")
    (folder / "port").rename(folder / "gcs_server_port_1")
    said = [line for line in (child.stdout.readline().strip() for _ in range(6)) if line]
    both = {"10.0.0.1": 8, "10.0.0.1:4321": 0}
    assert [parse_line(line) for line in said] == [(4321, nodes) for nodes in ({}, {"10.0.0.1": 8}, both)]
    assert child.communicate(timeout=WITHIN_S)[0] == ""
    assert child.returncode == 0
