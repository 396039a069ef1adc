"""What a launcher makes of its environment, and that one which cannot begin leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_serve.errors import HpcServeError
from hpc_serve.job.launcher import launch
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.job.prepare import prepare
from hpc_serve.job.run.node import LaunchOptions

OPTIONS = LaunchOptions(service="8b", backend="auto", gpus_per_node=0)


@pytest.mark.parametrize(
    ("change", "model", "why"),
    [
        ({"HPC_SERVE_SILENCE_S": "4.9"}, ["m"], "must be 5 to 3600"),
        ({"HPC_SERVE_SILENCE_S": "3601"}, ["m"], "must be 5 to 3600"),
        ({"HPC_SERVE_SILENCE_S": "nan"}, ["m"], "must be 5 to 3600"),
        ({"HPC_SERVE_SILENCE_S": "a minute"}, ["m"], "HPC_SERVE_SILENCE_S=a minute"),
        ({"HPC_SERVE_STALL_S": "half an hour"}, ["m"], "HPC_SERVE_STALL_S=half an hour"),
        ({"HPC_SERVE_PREFLIGHT": "no"}, ["m"], "HPC_SERVE_PREFLIGHT=no: it must be on, warn"),
        ({"HPC_SERVE_PREFLIGHT": "only"}, ["m"], "must be on, warn"),
        ({}, [], "MODEL"),
    ],
)
def test_a_run_that_cannot_begin_says_why_and_leaves_nothing(environ, tmp_path, change, model, why):
    allocation = read_allocation(environ)
    scene = {**environ, **prepare("8b", allocation, environ), "HPC_SERVE_CACHE_SIZE": "0", **change}
    with pytest.raises(HpcServeError, match=why):
        launch(OPTIONS, ["vllm", "serve", *model], allocation, scene)
    assert not list((tmp_path / "home" / "jobs").iterdir())
    assert not Path(scene["HPC_SERVE_NODE_TMP"]).exists()


def test_a_launcher_without_its_scene_says_what_makes_it(environ):
    with pytest.raises(HpcServeError, match=r"hpc_serve\.job\.prepare"):
        launch(OPTIONS, ["vllm", "serve", "m"], read_allocation(environ), environ)
