"""The children that hold Ray and report its nodes, as programs of their own; Ray itself is a few lines of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.job.run.ray_cluster import RayNodes, parse_gcs_port, parse_nodes

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


def fake_ray(folder: Path, text: str) -> Path:
    """A package of Ray, and its script as an installer writes it."""
    package = folder / "ray" / "scripts"
    package.mkdir(parents=True)
    for module, code in ((package.parent / "__init__.py", ""), (package / "__init__.py", "")):
        module.write_text(code)
    (package / "scripts.py").write_text(f"def main():\n    {SAYS}\n    return 7\n")
    script = folder / "bin" / "ray"
    script.parent.mkdir()
    script.write_text(text)
    script.chmod(0o755)
    return script


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
    ray = fake_ray(tmp_path, OF_RAY)
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text(HEAD)
    private = tmp_path / "ray" / "_private"
    private.mkdir()
    (private / "__init__.py").write_text("")
    (private / "services.py").write_text(
        "def start_api_server(include_dashboard, raise_on_failure):\n    return 1, 2\n"
    )
    environ = {"PATH": str(ray.parent), "PYTHONPATH": str(tmp_path)}
    child = start("ray_start", **environ)
    order = {"argv": ["ray", "start"], "environ": environ, "watch": [str(tmp_path / "none"), "10.0.0.1", "GPU"]}
    said, _ = child.communicate(json.dumps(order) + "\n", timeout=WITHIN_S)
    assert json.loads(said) == [None, ["", None], None]


def test_ray_still_calls_what_leaves_its_unused_servers_out():
    """A Ray that does not would start them again, and listen on the port of Ray Client, which the launcher holds."""
    scripts = Path(pytest.importorskip("ray.scripts.scripts").__file__).read_text()
    assert "load_class(os.environ[ray_constants.RAY_START_HOOK])(ray_params, head)" in scripts
    assert pytest.importorskip("ray._private.ray_constants").RAY_START_HOOK == "RAY_START_HOOK"
    node = Path(pytest.importorskip("ray._private.node").__file__).read_text()
    assert "self._webui_url, process_info = ray._private.services.start_api_server(" in node
    assert "if self._ray_params.ray_client_server_port:\n            self.start_ray_client_server()" in node


def test_of_rays_command_line_what_starts_ray_alone_is_imported():
    pytest.importorskip("ray.scripts.scripts")
    code = "import sys, hpc_serve.job.ray.ray_start as it; it._import_scripts(); print(sorted(sys.modules))"
    environ = {"PATH": os.path.dirname(sys.executable)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert "'ray.scripts.scripts'" in done.stdout
    assert not [name for name in ("ray.serve", "ray.util.state.state_cli", "fastapi") if f"'{name}'" in done.stdout]


def test_it_ends_with_a_launcher_that_says_nothing(tmp_path):
    ray = fake_ray(tmp_path, OF_RAY)
    child = start("ray_start", PATH=str(ray.parent), PYTHONPATH=str(tmp_path))
    assert child.communicate(timeout=WITHIN_S)[0] == ""
    assert child.returncode == 0


def test_the_port_and_every_change_of_the_nodes_are_printed_until_standard_input_is_closed(tmp_path):
    fake_ray(tmp_path, OF_RAY)
    (tmp_path / "ray" / "_raylet.py").write_text(CLIENT)
    child = start("ray_nodes", str(tmp_path / "session"), "10.0.0.1", "GPU", PYTHONPATH=str(tmp_path))
    folder = tmp_path / "session" / "session_latest"
    folder.mkdir(parents=True)
    (folder / "port").write_text("4321")
    (folder / "port").rename(folder / "gcs_server_port_1")
    assert child.stdout is not None
    said = [line for line in (child.stdout.readline().strip() for _ in range(6)) if line]
    assert parse_gcs_port(said[0]) == 4321
    both = {"10.0.0.1": 8, "10.0.0.1:4321": 0}
    assert [parse_nodes(line) for line in said[1:]] == [RayNodes({"10.0.0.1": 8}), RayNodes(both)]
    assert child.communicate(timeout=WITHIN_S)[0] == ""
    assert child.returncode == 0
