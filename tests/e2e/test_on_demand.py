"""A gateway that starts models when they are asked for, on a real Slurm: three models, room for two, ten clients.

The engine is the stub. HPC_SERVE_ON_DEMAND_S is how long the clients ask [60]; the issue's own figure is 600.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.e2e.test_replicas import SMALL
from tests.e2e.wanted import MOST_S

pytestmark = [pytest.mark.slurm]

ASKING = Path(__file__).with_name("ask_on_demand.py")
MODELS = ("red", "green", "blue")
SECONDS = float(os.environ.get("HPC_SERVE_ON_DEMAND_S", "60"))
CLIENTS, ROOM = 10, 2


@pytest.fixture
def alice_variables(stub_env):
    return {**stub_env, "STUB_ENGINE_ARGS": "--stub-words 3 --stub-word-s 0.1"}


def test_three_models_share_the_room_of_two(alice, show_table):
    words = " ".join(("8b", *SMALL))
    listed = "".join(f"  {name}: {words}\n" for name in MODELS)
    file = alice.write("models.yaml", f"services: {ROOM}\nmodels:\n{listed}")
    argv = ["hpc-serve", "gateway", "--port", "0", "--on-demand", str(file), "--wait", "10m"]
    gateway = alice.cluster.popen(argv, user="alice", env={**alice.environ, "PYTHONUNBUFFERED": "1"})
    said: list[str] = []
    try:
        base_url = ""
        for line in gateway.stdout:
            said.append(line)
            if match := re.search(r"OPENAI_BASE_URL=(\S+)", line):
                base_url = match[1]
            if "OPENAI_API_KEY" in line:
                break
        assert base_url, said
        reader = threading.Thread(target=lambda: said.extend(gateway.stdout), daemon=True)
        reader.start()
        key = (alice.home / ".hpc-serve" / "gateway" / "api_key").read_text().strip()
        asking = alice.cluster.popen(
            [sys.executable, str(ASKING), base_url, str(SECONDS), str(CLIENTS), *MODELS],
            user="alice",
            env={**alice.environ, "OPENAI_API_KEY": key},
        )
        most = 0
        while asking.poll() is None:
            told = json.loads(alice.hpc_serve_said("status", "--json"))
            live = {one["service"] for one in told["services"] if one["state"] not in ("stopped", "failed")}
            most = max(most, len(live))
        found = json.loads(asking.stdout.read().splitlines()[-1])
        decided = [line.strip() for line in said if "on demand:" in line]
        show_table("\n".join([*decided, json.dumps(found), f"at most {most} services at once"]))
        assert found["errors"] == []
        assert all(found["answered"].values())
        assert most <= ROOM
        assert any(" end " in line for line in decided)
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(MOST_S)
        alice.hpc_serve("stop", *MODELS, "--now")
