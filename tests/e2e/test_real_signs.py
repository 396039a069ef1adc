"""A real vLLM engine behind the gate: signs come while it reads a long prompt, stop with its core, and come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.gate_headers import PROCESSING
from tests.cluster import processes

pytestmark = [pytest.mark.engine]

KEY = "k-0123456789abcdef"
START_S = 600.0
# With more than SILENCE_S between two signs a client calls a replica lost.
SILENCE_S = 1.5


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The port and the process of a tiny engine whose one step reads a whole long prompt."""
    folder = tmp_path_factory.mktemp("engine")
    model = make_demo_model(folder / "model", like="8b")
    (folder / "key").write_text(KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "m"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--kv-cache-memory-bytes", "268435456"]
    argv += ["--max-model-len", "32768", "--max-num-batched-tokens", "32768"]
    argv += ["--middleware", "hpc_serve.gate.engine_gate.Gate"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HPC_SERVE_")}
    environ |= {"HPC_SERVE_API_KEY_FILE": str(folder / "key"), "HPC_SERVE_CANARY_S": "5", "PYTHONPATH": os.getcwd()}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _is_up(port):
            is_starting = process.poll() is None and time.monotonic() < deadline
            assert is_starting, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield port, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _core(process: subprocess.Popen[bytes]) -> int:
    (core,) = [
        pid
        for pid in processes.pids()
        if processes.is_alive(pid)
        and (processes.argv_of(pid) or ("",))[0].startswith("VLLM::EngineCore")
        and os.getsid(pid) == process.pid
    ]
    return core


class Asked:
    """A completion under way, and the times at which something of it came."""

    def __init__(self, port: int, words: int, tokens: int, *, stream: bool) -> None:
        asked = {"model": "m", "prompt": f"{time.time()} " + "place " * words, "max_tokens": tokens, "stream": stream}
        body = json.dumps({**asked, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer {KEY}\r\nX-HPC-Serve-Signs: 1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(head.encode() + body)
        self.times = [time.monotonic()]
        self.parts: list[bytes] = []

    def read(self, most_s: float) -> bool:
        """Read one more piece; False if none comes for so long."""
        self.socket.settimeout(most_s)
        try:
            part = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        assert part, "the connection ended"
        self.times.append(time.monotonic())
        self.parts.append(part)
        return True

    @property
    def is_over(self) -> bool:
        return bool(self.parts) and self.parts[-1].endswith((b"0\r\n\r\n", b"]}", b"}"))

    @property
    def longest_pause_s(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


def test_a_long_prompt_that_is_read_in_one_step_has_signs_all_along(engine):
    port, _ = engine
    Asked(port, 10, 1, stream=False).read(60)
    asked = Asked(port, 30_000, 2, stream=False)
    while not asked.is_over:
        assert asked.read(10 * SILENCE_S)
    text = b"".join(asked.parts)
    took_s = asked.times[-1] - asked.times[0]
    print(f"{text.count(PROCESSING)} signs, longest pause {asked.longest_pause_s:.2f} s, took {took_s:.1f} s")
    assert text.count(PROCESSING) >= 2
    assert b"HTTP/1.1 200 OK" in text
    assert asked.longest_pause_s < SILENCE_S


@pytest.mark.parametrize("stream", [False, True])
def test_signs_stop_with_the_core_and_come_back_with_it(engine, stream):
    port, process = engine
    # As many tokens as the model takes: no machine is so fast that it ends while this test looks at it.
    asked = Asked(port, 10, 30_000, stream=stream)
    for _ in range(3):
        assert asked.read(60)
    core = _core(process)
    os.kill(core, signal.SIGSTOP)
    try:
        stopped_at = time.monotonic()
        while asked.read(6.0):  # what comes within 6 s is not silence yet
            assert time.monotonic() - stopped_at < 20
        print(f"stopped: the last sign came after {asked.times[-1] - stopped_at:.2f} s")
        assert not asked.is_over
    finally:
        os.kill(core, signal.SIGCONT)
    for _ in range(3):
        assert asked.read(60)
    asked.socket.close()
