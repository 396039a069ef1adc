"""What the kernel says of the packets of a question. Real connections on this machine."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_serve.client.silence.questions import _Path
from tests.support.patience import wait_until


def path_of(connected: socket.socket | None) -> _Path:
    connection: Any = SimpleNamespace(sock=connected)
    return _Path(connection)


def test_what_arrives_at_once_is_acknowledged_and_not_sent_again():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as asking:
        path = path_of(asking)
        asking.sendall(b"question")
        answering, _ = server.accept()
        with answering:
            assert answering.recv(8) == b"question"
            wait_until(lambda: not path.is_unacknowledged)
        assert not path.was_sent_again


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel says nothing of packets")
def test_what_is_lost_is_not_acknowledged_and_sent_again():
    """A host drops what would begin a connection while as many as it may hold wait to be taken."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.create_connection(server.getsockname()),
        socket.socket() as asking,
    ):
        path = path_of(asking)
        asking.setblocking(False)
        asking.connect_ex(server.getsockname())
        assert path.is_unacknowledged
        wait_until(lambda: path.was_sent_again)


def test_a_connection_that_is_being_made_waits_for_a_packet_until_it_is_over():
    path = path_of(None)
    assert path.is_unacknowledged
    path.remember()
    assert not path.is_unacknowledged
    assert not path.was_sent_again
    closed = path_of(socket.socket())
    closed.connection.sock.close()
    assert not closed.was_sent_again
