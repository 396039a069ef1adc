"""Every way in to a service: with the right key, with none, with a wrong one, as a page of another origin, and by a
host name that DNS rebinding led here.

A page of another origin has no key; that it is refused with one shows that the origin decides.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_serve.gateway.personal_keys import add_person

BODY = json.dumps({"model": "405b", "prompt": "Why?"})
WRONG = "x" * 43
Ask = Callable[..., int]


def asking(connect: Callable[[], http.client.HTTPConnection]) -> Ask:
    """Return what asks on a connection of its own, with a key and further headers, and returns the status."""

    def ask(key: str | None, **headers: str) -> int:
        shown = {"Authorization": f"Bearer {key}"} if key is not None else {}
        connection = connect()
        try:
            connection.request(
                "POST", "/v1/completions", BODY, {"Content-Type": "application/json", **shown, **headers}
            )
            return connection.getresponse().status
        finally:
            connection.close()

    return ask


def over_tls(port: int) -> http.client.HTTPConnection:
    """Return a connection that believes any certificate, as a stranger's does."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)


def over_socket(path: Path) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    return connection


def port_of(said: str) -> int:
    found = re.search(r"https?://[^/\s]+:(\d+)/v1", said)
    assert found, said
    return int(found[1])


@pytest.fixture
def way(request, service, program, tmp_path) -> Iterator[tuple[Ask, str | None]]:
    """What asks by this way, and its right key."""
    engine = service.start()
    home = service.store.home
    if request.param == "engine":
        yield asking(lambda: over_tls(engine.port)), service.key_file.read_text().strip()
    elif request.param == "socket":
        program("--socket", str(tmp_path / "s")).started()
        yield asking(lambda: over_socket(tmp_path / "s")), None
    elif request.param == "port":
        port = port_of(program("--port", "0").started().said)
        key = (home / "gateway" / "api_key").read_text().strip()
        yield asking(lambda: http.client.HTTPConnection("127.0.0.1", port, timeout=60)), key
    else:
        key = add_person(home / "gateway", "alice", max_in_flight=None, tokens_a_day=None)
        shared = tmp_path / "shared"
        words = ("--port", "0", "--host", "0.0.0.0", "--share", str(shared), "--own-keys")
        program(*words).started()
        port = port_of((shared / "env.sh").read_text())
        yield asking(lambda: over_tls(port)), key


@pytest.mark.parametrize(
    ("way", "keys", "page", "rebound"),
    [
        ("engine", (200, 401, 401), (401, 200), (401, 200)),
        ("port", (200, 401, 401), (403, 403), (421, 421)),
        ("tls", (200, 401, 401), (403, 403), (401, 200)),  # a browser refuses the name, which is not in the certificate
        ("socket", (200, 200, 200), (403, 403), (421, 421)),  # nobody else can connect
    ],
    indirect=["way"],
)
def test_keys_pages_and_host_names(way, keys, page, rebound):
    """Of `page` and `rebound`, the first is without a key, as a page has none, and the second with it."""
    ask, key = way
    assert (ask(key), ask(None), ask(WRONG)) == keys
    for origin in ("http://evil.example", "null", "http://localhost.evil.example"):
        assert (ask(None, Origin=origin), ask(key, Origin=origin)) == page, origin
    for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
        assert (ask(None, Host=host), ask(key, Host=host)) == rebound, host


@pytest.mark.parametrize("way", ["engine", "port", "tls"], indirect=True)
def test_of_a_key_and_its_neighbours_the_key_alone_is_taken(way):
    ask, key = way
    assert key is not None
    assert [ask(one) for one in (key[:-1], f"{key}x", key.swapcase(), "", " ", f"{key}, {WRONG}")] == [401] * 6
    assert ask(key) == 200
