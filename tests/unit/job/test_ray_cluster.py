"""Ray's command lines: every port is given, the job's share and no more, nothing secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.ray.ray_cluster import HeadRay, head_argv, ray_environ, worker_argv
from hpc_serve.job.ray.ray_nodes import missing_nodes, parse_line
from hpc_serve.job.ray.ray_private import read_gcs_port
from hpc_serve.job.run.node import LaunchOptions, Node
from hpc_serve.trust.certificates import PeerFiles
from hpc_serve.units import GIB
from tests.support.nodes import ALLOCATION, make_node


def of_node(allocation: Allocation = ALLOCATION, **options: Any) -> Node:
    return make_node(
        Path("/tmp/hs-1"),
        allocation=allocation,
        options=LaunchOptions(**{"service": "8b", "backend": "ray", "gpus_per_node": 8, **options}),
    )


NODE = of_node()
EXPECTED = {"10.0.0.1": "n1", "10.0.0.2": "n2"}


def options(argv: Sequence[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--"))


def test_ray_gets_the_jobs_share_and_not_the_machines():
    said = options(head_argv(NODE, client_port=20_002))
    assert (said["num-cpus"], said["num-gpus"]) == ("16", "8")
    assert int(said["memory"]) + int(said["object-store-memory"]) == 64 * GIB
    unlimited = options(head_argv(of_node(replace(ALLOCATION, memory_bytes=None)), client_port=2))
    assert int(unlimited["memory"]) > GIB


def test_chips_of_a_tpu_are_a_resource_like_any_other():
    said = options(worker_argv(of_node(device="TPU", gpus_per_node=4), head="10.0.0.9:1"))
    assert (said["num-gpus"], json.loads(said["resources"])) == ("0", {"TPU": 4})
    assert (said["address"], "head" in said) == ("10.0.0.9:1", False)


OF_BOTH = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, {"HIP_VISIBLE_DEVICES": "4,5"}),
        (OF_BOTH, OF_BOTH),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_amd_gpus_are_named_as_ray_takes_them(monkeypatch, given, seen):
    environ = ray_environ(replace(NODE, environ=given))
    assert {name: value for name, value in environ.items() if name.endswith("VISIBLE_DEVICES")} == seen
    manager = pytest.importorskip("ray._private.accelerators.amd_gpu").AMDGPUAcceleratorManager
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert manager.get_visible_accelerator_ids_env_var() == "HIP_VISIBLE_DEVICES"


def test_ray_still_refuses_rocms_own_name(monkeypatch):
    """Why the renaming is there; when this fails, it can go."""
    manager = pytest.importorskip("ray._private.accelerators.amd_gpu").AMDGPUAcceleratorManager
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    with pytest.raises(RuntimeError, match="HIP_VISIBLE_DEVICES"):
        manager.get_visible_accelerator_ids_env_var()


def test_every_port_is_given_and_zero_for_all_but_ray_clients():
    for argv in (head_argv(NODE, client_port=20_002), worker_argv(NODE, head="10.0.0.9:1")):
        ports = {name: int(value) for name, value in options(argv).items() if name.endswith("port")}
        chosen = {name: port for name, port in ports.items() if port}
        assert chosen in ({}, {"ray-client-server-port": 20_002})
        assert len(ports) - len(chosen) == (9 if chosen else 8)


def test_the_port_of_the_gcs_is_known_once_ray_has_written_it(tmp_path):
    session = tmp_path / "session_1"
    session.mkdir()
    assert read_gcs_port(str(tmp_path)) is None
    (tmp_path / "session_latest").symlink_to("session_1")
    assert read_gcs_port(str(tmp_path)) is None
    (session / "gcs_server_port_17bf").write_text("")
    assert read_gcs_port(str(tmp_path)) is None
    (session / "gcs_server_port_17bf").write_text("38589")
    assert read_gcs_port(str(tmp_path)) == 38_589


def test_ray_knows_every_port_option():
    scripts = pytest.importorskip("ray.scripts.scripts")
    known = {name for option in scripts.start.params for name in option.opts}
    for argv in (head_argv(NODE, client_port=20_002), worker_argv(NODE, head="10.0.0.9:1")):
        assert {word.partition("=")[0] for word in argv if word.startswith("--")} <= known


def test_rays_connections_show_token_and_certificates_and_its_metrics_do_not_listen():
    environ = ray_environ(replace(NODE, environ={"X": "1"}))
    assert (environ["X"], environ["RAY_AUTH_MODE"], environ["RAY_USE_TLS"]) == ("1", "token", "1")
    peer = PeerFiles.in_folder(NODE.node_dir / "tls")
    assert environ["RAY_TLS_CA_CERT"] == str(peer.authority)
    assert (environ["RAY_TLS_SERVER_CERT"], environ["RAY_TLS_SERVER_KEY"]) == (str(peer.certificate), str(peer.key))
    constants = pytest.importorskip("ray._common.tls_utils")
    source = Path(constants.__file__).read_text()
    assert all(name in source for name in environ if name.startswith("RAY_TLS_"))
    assert "--no-monitor" in head_argv(NODE, client_port=2)


def test_who_is_missing_is_named():
    assert missing_nodes({"10.0.0.1": 8, "10.0.0.2": 8}, EXPECTED, "GPU", 8) == []
    assert missing_nodes({"10.0.0.1": 8}, EXPECTED, "GPU", 8) == ["n2 (10.0.0.2) has not joined"]
    assert missing_nodes({"10.0.0.1": 8, "10.0.0.2": 4}, EXPECTED, "TPU", 8) == [
        "n2 (10.0.0.2) has 4 TPUs instead of 8"
    ]
    assert missing_nodes({"10.0.0.1": 8, "10.0.0.2": 8, "10.0.0.3": 8}, EXPECTED, "GPU", 8) == [
        "10.0.0.3 joined but is not of this job"
    ]


def test_rays_log_lines_are_not_taken_for_nodes():
    assert parse_line('{"hpc_serve_ray": [4321, {"10.0.0.1": 8}]}') == (4321, {"10.0.0.1": 8})
    for line in ("INFO worker.py: Connecting", "[1, 2]", "7", "{}"):
        assert parse_line(line) is None


# -- Ray as its head's launcher follows it: what it waits for, by the lines that Ray's head prints


LINES = ('{"hpc_serve_ray": [4321, {}]}', '{"hpc_serve_ray": [4321, {"127.0.0.1": 1}]}')


class Parts:
    """Waits by the lines above, and keeps what was missing."""

    def __init__(self) -> None:
        self.said: list[str | None] = []
        self.changes = 0
        self.ray: Any = None

    def require_command(self, name: str, command: str, environ: object) -> None:
        pass

    def note_change(self) -> None:
        self.changes += 1

    async def wait_until_complete(self, missing: Any, *, part: str, within_s: float) -> None:
        assert part == "ray head"
        self.said.append(missing())
        for line in LINES:
            self.ray.read_line(line)
            self.said.append(missing())


class Keeper:
    def set_phrase(self, *words: object) -> None:
        pass


async def test_others_join_once_the_head_is_a_node_of_its_ray(tmp_path: Path):
    """Ray has a node that comes before the head look again only after two seconds."""
    parts = Parts()
    parts.ray = ray = HeadRay(make_node(tmp_path), cast(Any, parts), cast(Any, Keeper()))
    environ = await ray.engine_environ()
    not_joined = "n1 (127.0.0.1) has not joined the Ray that it started"
    assert parts.said == ["Ray's GCS does not listen", not_joined, None]
    assert environ["RAY_ADDRESS"] == "127.0.0.1:4321"
    assert parts.changes == len(LINES)
