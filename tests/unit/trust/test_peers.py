"""Ray's certificates: real gRPC lets in a node of the run and nobody else, whatever he shows."""

from __future__ import annotations

import stat
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.trust.certificates import PeerFiles, make_peer_files, make_run_certificate

grpc: Any = pytest.importorskip("grpc")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def ask(server: PeerFiles, *shown: bytes | None) -> str:
    """What a client with these three (authority, key, certificate) is told by a server of the run."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: object) -> object:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"come in")

    running = grpc.server(futures.ThreadPoolExecutor(1))
    running.add_generic_rpc_handlers((Handler(),))
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], server.authority.read_bytes(), require_client_auth=True)
    port = running.add_secure_port("127.0.0.1:0", credentials)
    running.start()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*shown)) as channel:
            return channel.unary_unary("/any/Call")(b"", timeout=60).decode()
    except grpc.RpcError as error:
        return str(error.code())
    finally:
        running.stop(0)


def shown_by(files: PeerFiles) -> tuple[bytes, bytes, bytes]:
    return files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()


def test_nodes_of_one_run_know_each_other(run_dir, tmp_path):
    one, two = (make_peer_files(run_dir, tmp_path / name, addresses=["10.0.0.1"]) for name in ("n1", "n2"))
    assert one.authority.read_bytes() == two.authority.read_bytes()
    assert one.key.read_bytes() != two.key.read_bytes()
    assert ask(one, *shown_by(two)) == "come in"


def test_nobody_else_is_let_in_nor_is_a_server_of_another_run_believed(run_dir, tmp_path):
    one = make_peer_files(run_dir, tmp_path / "n1", addresses=["10.0.0.1"])
    (tmp_path / "other").mkdir(mode=0o700)
    other = make_peer_files(tmp_path / "other", tmp_path / "n2", addresses=["10.0.0.1"])
    ours = one.authority.read_bytes()
    endpoint = make_run_certificate(tmp_path / "home", tmp_path / "n1", run="1-r0", addresses=["127.0.0.1"])
    shown = {
        "no certificate": (None, None),
        "another run's": shown_by(other)[1:],
        "the endpoint's": (endpoint.key_file.read_bytes(), endpoint.certificate_file.read_bytes()),
    }
    answers = {who: ask(one, ours, *what) for who, what in shown.items()}
    assert answers == dict.fromkeys(shown, "StatusCode.UNAVAILABLE")
    assert ask(other, *shown_by(one)) == "StatusCode.UNAVAILABLE"


def test_the_files_are_the_users_alone_and_the_nodes_have_no_authoritys_key(run_dir, tmp_path):
    files = make_peer_files(run_dir, tmp_path / "n1", addresses=["10.0.0.1"])
    made = [run_dir / "ray_authority.pem", files.authority, files.certificate, files.key]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o600] * 4
    assert stat.S_IMODE(files.key.parent.stat().st_mode) == 0o700
    assert b"PRIVATE" not in files.authority.read_bytes()
