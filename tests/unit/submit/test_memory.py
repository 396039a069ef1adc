"""A job asks for the memory of what it keeps in /dev/shm and other folders in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.sizes import GIB
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.environment import JobSettings
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.request.sbatch_options import SlurmOptions
from hpc_serve.submit.script.render import render_script

REQUEST = ServeRequest(model="8b", service="8b")


def mem(request: ServeRequest) -> str:
    """The value of --mem in its script."""
    lines = render_script(request, plan_service(request)).splitlines()
    (found,) = (line for line in lines if line.startswith("#SBATCH --mem="))
    return found.partition("--mem=")[2]


@pytest.mark.parametrize(
    ("settings", "memory_folders", "expected"),
    [
        ({}, (), "32G"),
        ({"stage": "/dev/shm"}, (), "48G"),
        ({"stage": "/dev/shm/models"}, (), "48G"),
        ({"stage": "/local"}, (), "32G"),
        ({"stage": "on"}, (), "32G"),
        ({"stage": "off"}, ("/tmp",), "36G"),
        ({"stage": "on"}, ("/tmp",), "52G"),
        ({"stage": "on", "tmpdir": "/local"}, ("/tmp",), "32G"),
        ({"cache_dir": "/dev/shm/cache"}, (), "36G"),
        ({"tmpdir": "/ram/x"}, ("/ram",), "36G"),
    ],
)
def test_files_in_memory_are_asked_for(settings, memory_folders, expected):
    request = replace(REQUEST, settings=JobSettings(**settings), memory_folders=memory_folders)
    weights = plan_service(request).memory.weight_bytes
    assert 14 * GIB < weights < 15 * GIB  # and one GiB for the files beside them
    assert mem(request) == expected


def test_a_copy_takes_at_most_half_of_the_memory():
    request = ServeRequest(
        model="70b", service="70b", num_nodes=1, gpus_per_node=4, settings=JobSettings(stage="/dev/shm")
    )
    plan = plan_service(request)
    copied = plan.memory.weight_bytes * plan.layout.tensor_parallel_size
    asked = int(mem(request).removesuffix("G")) * GIB
    assert asked >= 2 * copied
    assert asked - copied >= (16 + 16 * 4) * GIB


def test_replicas_that_share_a_node_share_the_copy():
    several = replace(REQUEST, replicas_per_job=2)
    assert mem(several) == "144G"
    assert mem(replace(several, settings=JobSettings(stage="/dev/shm"))) == "160G"


@pytest.mark.parametrize("mem_asked", ["20G", "0"])
def test_what_a_person_asks_for_wins(mem_asked):
    request = replace(REQUEST, slurm=SlurmOptions(mem=mem_asked), settings=JobSettings(stage="/dev/shm"))
    assert mem(request) == mem_asked
