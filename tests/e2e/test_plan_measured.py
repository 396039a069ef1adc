"""The planner against real engines on CPU: bytes of weights on each rank, and the tokens of a given KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.demo_model import make_demo_model
from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import EngineConfig, accelerator, estimate_memory
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.units import GIB
from hpc_serve.vllm.log import read_figures

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE_BYTES = 67_000_000  # no multiple of a block
MAX_MODEL_LEN = 4000
ENGINE_START_S = 600

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", like="70b")


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_prediction_is_what_the_engine_holds(folder: Path, tp: int, pp: int) -> None:
    words = (str(folder), str(tp), str(pp), str(CACHE_BYTES), str(MAX_MODEL_LEN))
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engine_figures", *words],
        cwd=CHECKOUT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=ENGINE_START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (done.stdout + done.stderr).splitlines()
    measured = {name: value for line in lines for name, value in read_figures(line).items()}
    loaded = next(json.loads(line.partition(" ")[2]) for line in lines if line.startswith("FIGURES "))

    _, spec, _ = find_spec(str(folder))
    estimate = estimate_memory(
        spec,
        accelerator("cpu-spr", total_bytes=24 * GIB),
        EngineConfig(kv_cache_memory_bytes=CACHE_BYTES),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=MAX_MODEL_LEN,
    )
    assert loaded["weight_bytes"] == [stage.weight_bytes for stage in pipeline_stages(spec, tp, pp) for _ in range(tp)]
    assert measured["kv_cache_tokens"] == estimate.kv_cache_tokens
    assert measured["max_concurrency"] == pytest.approx(estimate.max_concurrency, abs=0.005)
    assert measured["max_model_len"] == MAX_MODEL_LEN
