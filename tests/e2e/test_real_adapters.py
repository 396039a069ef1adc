"""LoRA adapters on real vLLM on CPUs, without Slurm: from the start, added, replaced, refused by the engine, removed.

The model and the adapters are tiny and random; that a greedy answer of each differs says which one has answered.
`make kinds` runs this, `make test` skips it. tests/e2e/test_adapters.py has several replicas, with the stub engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import hpc_serve.client
from hpc_serve.client import tell_all
from hpc_serve.demo_model import make_demo_model
from tests.e2e.test_real_kinds import SWITCH
from tests.support.adapters import make_adapter
from tests.support.patience import wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"minutes of two cores ({SWITCH} is not 1): `make kinds`"),
]
PAUSE_S = 12.0  # longer than a step may take
OPTIONS = (
    *("--cluster", "local", "--gpu", "cpu", "--gpu-memory", "4GiB", "--wait"),
    *("--", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "2048", "--enforce-eager"),
)


def test_adapters_come_change_and_go_while_the_engine_serves(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HPC_SERVE_ENV", sys.prefix)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # vLLM's routes to pause an engine and to load weights
    command = str(Path(sys.executable).with_name("hpc-serve"))

    def said(*words: str, code: int = 0) -> str:
        done = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    model = make_demo_model(tmp_path / "model")
    first, second, third = (make_adapter(tmp_path / f"seed-{seed}", seed=seed) for seed in range(3))
    unknown = make_adapter(tmp_path / "unknown", module="self_attn.no_such_proj")
    try:
        said("submit", "--model", str(model), "--service", "tuned", "--lora", f"sql={first}", *OPTIONS)
        client = hpc_serve.client.connect("tuned")

        def answer(name: str) -> str:
            asked = client.completions.create(model=name, prompt="the people", max_tokens=12, temperature=0)
            return str(asked.choices[0].text)

        said("adapter", "add", "tuned", "poem", str(second))
        answers = {name: answer(name) for name in (client.model, "sql", "poem")}
        assert len(set(answers.values())) == 3
        refused = said("adapter", "add", "tuned", "sql", str(unknown), code=2)
        assert f"{first} is loaded again" in refused
        assert "no_such_proj" in refused
        assert answer("sql") == answers["sql"]
        said("adapter", "add", "tuned", "sql", str(third))
        assert answer("sql") not in answers.values()
        assert answer("poem") == answers["poem"]
        before = answer("sql")
        shutil.rmtree(third)  # an adapter that has replaced another is read once
        assert answer("sql") == before
        said("adapter", "remove", "tuned", "poem")
        with pytest.raises(openai.NotFoundError, match="`poem` does not exist"):
            answer("poem")

        tell_all("tuned", "/pause?mode=keep")
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(answer, "sql")
            time.sleep(PAUSE_S)
            assert json.loads(said("status", "tuned", "--json"))["services"][0]["state"] == "ready"
            assert not asked.done()
            tell_all("tuned", "/resume")
            assert asked.result() not in answers.values()
        assert json.loads(said("status", "tuned", "--json"))["services"][0]["weight_version"] == "default"
        before = answer(client.model)
        reload = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(make_demo_model(tmp_path / "new", seed=1))},
        }
        tell_all("tuned", "/collective_rpc", reload)
        tell_all("tuned", "/reset_prefix_cache")
        assert answer(client.model) != before
        tell_all("tuned", "/update_weight_version", {"new_version": "step-200"})
        wait_until(lambda: "  weights    version step-200\n" in said("status", "tuned"))
        with pytest.raises(openai.PermissionDeniedError, match="hpc-serve adapter add"):
            client.post("/load_lora_adapter", body={"lora_name": "x", "lora_path": str(first)}, cast_to=object)
    finally:
        subprocess.run([command, "stop", "tuned"], check=False)
