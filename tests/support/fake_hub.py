"""A hub on this machine: the API that huggingface_hub asks for a model's files, over real HTTP, with faults on demand.

Large files are redirected to another address, as the hub does to its own storage; ranges are answered there alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
LARGE = (".safetensors", ".bin", ".gguf", ".pth")


@dataclass
class FakeHub:
    """Models by name, each with files by path. `breaks` says after how many bytes each next answer for a file ends;
    `refusals` are the statuses of next answers; `given` replaces what is sent for a file; `ranges` are the offsets that
    were asked for, by path."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    refusals: dict[str, list[int]] = field(default_factory=dict)
    given: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False
    status: int = 200
    hold: threading.Event | None = None
    """Where it is set, an answer that breaks waits for it, with its connection open."""
    broken: threading.Event = field(default_factory=threading.Event)
    """Some answer has been broken off, or waits."""
    ranges: list[tuple[str, int]] = field(default_factory=list)
    tokens: set[tuple[str, str]] = field(default_factory=set)
    """What was shown as Authorization, to the hub ("api", "resolve") and to the storage."""
    url: str = ""
    storage: str = ""

    def sent(self, path: str) -> int:
        """How often the content of a file was asked for."""
        return sum(path == one for one, _ in self.ranges)


@contextmanager
def running_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, at `hub.url`, while the context lasts."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.url, hub.storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}) for one in servers]
    for server, thread in zip(servers, threads):
        server.daemon_threads = True
        thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        for server, thread in zip(servers, threads):
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.split("?")[0].strip("/")
        words = path.split("/")
        where = words[0] if words[0] in ("api", "storage") else "resolve"
        hub.tokens.add((where, self.headers.get("Authorization", "")))
        if hub.status != 200:
            self._send(hub.status, {}, b"")
            return
        if words[:2] == ["api", "models"]:
            self._api("/".join(words[2:4]), words[4:])
        elif words[0] == "storage":
            self._content("/".join(words[1:3]), "/".join(words[3:]))
        elif where == "api":
            self._send(404, {}, b"")
        else:
            self._resolve("/".join(words[:2]), words[3], "/".join(words[4:]))

    def _api(self, name: str, words: list[str]) -> None:
        files = self.hub.models.get(name)
        if files is None:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        elif words[0] == "revision" and words[1] not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif words[0] == "revision":
            self._send_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})
        else:
            self._send_json([_entry(path, content) for path, content in files.items()])

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if self.hub.gated:
            self._send(403, {"X-Error-Code": "GatedRepo"}, b"")
            return
        files = self.hub.models.get(name, {})
        if path not in files or revision not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        content = files[path]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(path, content)}"'}
        if path.endswith(LARGE):
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(content))}
            headers["Location"] = f"{self.hub.storage}/storage/{name}/{path}"
            self._send(302, headers, b"")
        else:
            self._send(200, headers, content)

    def _content(self, name: str, path: str) -> None:
        hub = self.hub
        content = hub.given.get(path, hub.models[name][path])
        if self.command == "GET" and hub.refusals.get(path):
            self._send(hub.refusals[path].pop(0), {}, b"")
            return
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            hub.ranges.append((path, begin))
        status, headers = 200, {}
        if "Range" in self.headers:
            status, headers = 206, {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        else:
            begin = 0
        breaks = hub.breaks.get(path)
        ends = begin + breaks.pop(0) if breaks else None
        self._send(status, headers, content[begin:], ends=None if ends is None else ends - begin)

    def _send_json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes, ends: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:ends])
        if ends is not None:
            self.wfile.flush()
            self.hub.broken.set()
            if self.hub.hold is not None:
                self.hub.hold.wait()
            self.close_connection = True


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_id(content)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
    return entry


def _etag(path: str, content: bytes) -> str:
    return _sha256(content) if path.endswith(LARGE) else _git_id(content)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def model_files(*, shards: int = 3, shard_bytes: int = 3 << 20) -> dict[str, bytes]:
    """A model of several files of weights, each another, with an index, and what else repositories hold."""
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weights = {name: hashlib.shake_128(name.encode()).digest(shard_bytes) for name in names}
    index = {"metadata": {}, "weight_map": {f"layer{number}": name for number, name in enumerate(names)}}
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": b"{}",
        "README.md": b"words",
        "original/consolidated.00.pth": b"twice" * 1000,
        "pytorch_model.bin": b"again" * 1000,
        **weights,
    }


def cached(cache: Path, repository: str, config: object, revision: str = "0123abc") -> Path:
    """Make the snapshot of a repository in a cache, with its config alone."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot
