"""What a request, and sbatch's options in it, refuse without a plan or a cluster."""

from __future__ import annotations

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.request.options import Environment, SlurmOptions
from tests.unit.submit.service_8b import request

IMAGE = Environment(kind="apptainer", path="/images/vllm.sif")
CHAIN = {"chain": 3}
SHARED = {"replicas_per_job": 4}
LOCAL = {"cluster": "local"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_nodes": 0}, "nodes is 0"),
        ({"tensor_parallel_size": -1}, "tensor-parallel-size is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"engine_restarts": -1}, "engine-restarts is -1: it must be at least 0"),
        ({"backend": "mpi"}, "auto, ray or mp"),
        ({"log_dir": "logs"}, "absolute path"),
        ({"log_dir": "/a b"}, "log-dir"),
        ({"log_dir": "/logs/%x_%N"}, "of Slurm's patterns"),
        *(({"machine": name}, "machine is ") for name in ("", "a b", "../x", "a100\n#SBATCH --qos=x")),
        # replicas whose jobs submit others
        ({"replicas": 4, "max_replicas": 1}, "replicas is 4:1: the least, 4, is more than the most, 1"),
        ({"replicas": 0, "max_replicas": 3}, r"replicas is 0:3: at least 1 stays.*--idle-stop 30m"),
        ({"idle_stop_s": 0.0}, "idle-stop is 0: it must be at least 1"),
        ({"max_replicas": 4, "environment": IMAGE}, r"image /images/vllm\.sif.*hpc-serve scale"),
        ({"keep_up": True, "environment": IMAGE}, r"image /images/vllm\.sif.*--chain 7 is seven jobs"),
        # jobs submitted ahead
        ({"chain": 0}, "chain is 0: it must be at least 1"),
        ({"chain": 101}, "--chain is 101: at most 100"),
        ({"overlap_s": 600.0}, "--overlap is for jobs that are submitted ahead: add --chain N"),
        ({**CHAIN, "slurm": SlurmOptions(time=None)}, "--chain needs the time limit of each job: add --time"),
        ({**CHAIN, "slurm": SlurmOptions(time="30"), "overlap_s": 1800.0}, "--overlap is 30 min, .* less than a min"),
        ({**CHAIN, "overlap_s": 120.0}, r"--overlap is 2 min .* no new requests from 2 min before it \(--signal\)"),
        ({**CHAIN, "slurm": SlurmOptions(time="4")}, "--overlap is 2 min before the time limit"),
        # replicas that share a node
        ({"replicas_per_job": 0}, "replicas-per-job is 0: it must be at least 1"),
        ({**SHARED, "replicas": 6}, r"6 replicas cannot be dealt to jobs of 4 each .*: use --replicas 4 or 8\."),
        ({**SHARED, "replicas": 2}, r"use --replicas 4\."),
        ({**SHARED, "num_nodes": 2}, "divides one node, but --nodes is 2"),
        ({**SHARED, "engine_args": ("--port", "8000")}, "engines on one node need ports of their own"),
        # this machine alone
        ({**LOCAL, "num_nodes": 2}, "this machine alone"),
        ({**LOCAL, **SHARED, "replicas": 8}, "this machine alone, but 8 replicas"),
        ({**LOCAL, "environment": Environment(kind="pyxis", path="/x.sqsh")}, "pyxis is a part of Slurm"),
        ({**LOCAL, **CHAIN}, "leave it out with --cluster local"),
        ({**LOCAL, "max_replicas": 4}, "--replicas MIN:MAX is for jobs of Slurm"),
        ({**LOCAL, "idle_stop_s": 60.0}, "--idle-stop is for jobs of Slurm"),
        ({**LOCAL, "keep_up": True}, "leave it out with --cluster local"),
    ],
)
def test_what_cannot_be_is_refused(fields, why):
    with pytest.raises(InvalidRequestError, match=why):
        request(**fields)


def test_a_chain_of_an_image_is_taken():
    assert request(**CHAIN, environment=IMAGE)


@pytest.mark.parametrize("name", ["job_name", "partition", "account", "qos", "constraint", "mem"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a b", "a'b", 'a"b', "", "$HOME"])
def test_what_cannot_stand_in_a_directive_is_refused(name, value):
    with pytest.raises(InvalidRequestError, match=name.replace("_", "-")):
        SlurmOptions(**{name: value})


@pytest.mark.parametrize(
    ("word", "words"),
    [
        *((word, "--log-dir") for word in ("--output=/x.log", "-o=/x.log")),  # `logs` would not find it
        *((word, "extra sbatch option") for word in ("no-dashes", "--x=a\nb", "--x=a b", "-", "--")),
    ],
)
def test_an_extra_directive_is_checked_too(word, words):
    with pytest.raises(InvalidRequestError, match=words):
        SlurmOptions(extra=(word,))


TIME_LIMITS_S = {"90": 5400, "90:30": 5430, "12:00:00": 43200, "2-00": 172800, "1-12:30": 131400, "1-12:30:15": 131415}


@pytest.mark.parametrize(("time", "seconds"), [*TIME_LIMITS_S.items(), (None, None)])
def test_time_limits_as_slurm_writes_them(time, seconds):
    assert SlurmOptions(time=time).time_limit_s == seconds
