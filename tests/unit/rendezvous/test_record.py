"""The record as JSON: what is written is read, what is not a record is refused by name of the field."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.rendezvous.fields import (
    from_json_text,
    is_record_file_name,
    to_json_text,
    validate_job_id,
    validate_service_name,
)
from hpc_serve.rendezvous.record import (
    Adapter,
    EndpointRecord,
    JobEnd,
    NodeRecord,
    Progress,
    RecordState,
    StartRecord,
    SubmittedJob,
)
from tests.support.stubs import make_record, make_submitted

# Of each type of field one that is not its default.
FULL = make_record(
    job_id="123_4",
    restart=1,
    replica=2,
    user="älice",
    state="failed",
    progress=Progress(done=3, total=5),
    reason="engine exited with -9: CUDA out of memory",
    exit_code=-9,
    last_log_lines=("Traceback", "OutOfMemoryError: …"),
    nodes=(NodeRecord(name="n1", address="10.77.0.11"), NodeRecord(name="n2", address="10.77.0.12")),
    measured={"kv_cache_tokens": 1024, "weights_s": 1.5},
    state_since=2.0,
    engine_restarts=3,
    cache="warm, from /tmp/hpc-serve-cache-1000/0123456789abcdef-0 on this node",
    loading="prefetch: 15.0 GiB on gpfs, 500.0 GiB of memory are free",
    replicas_per_job=4,
    start=StartRecord(
        stage="weights", since=2.25, took_s={"nodes": 4.5}, checkpoint_bytes=16 * 2**30, bytes_per_s=2.0e9
    ),
    signs=True,
    drain_cause="stop",
    data_parallel_size=2,
    adapters={"sql": Adapter(path="/adapters/sql", added_at=2.0)},
    weight_version="7",
)

# The fields of a record, in its order. docs/design/record.md says what they mean.
CONTRACT = """version, service, model, stand_in, served_model_names,
    cluster, job_id, restart, replica, user, state, stage,
progress, reason, failed_part, exit_code, last_log_lines, hosts, port, nodes, tensor_parallel_size,
pipeline_parallel_size, num_nodes,
gpus_per_node, counter, lease_s, started_at, updated_at, log_dir, measured, predicted, certificate,
state_since, engine_restarts, cache, loading, replicas_per_job, start, signs, drain_cause, data_parallel_size,
adapters, weight_version"""


def test_what_is_written_is_read():
    assert from_json_text(EndpointRecord, to_json_text(FULL), source="x.json") == FULL


def test_the_fields_are_the_contracts():
    names = {name.strip() for name in CONTRACT.replace("\n", " ").split(",")}
    assert {field.name for field in fields(EndpointRecord)} == names
    assert json.loads(to_json_text(FULL)).keys() == names


def test_a_newer_versions_fields_are_ignored():
    newer = {"version": 2, "colour": "blue", "progress": {"done": 3, "total": 5, "unit": "shards"}}
    text = json.dumps({**json.loads(to_json_text(FULL)), **newer})
    assert from_json_text(EndpointRecord, text, source="x.json") == replace(FULL, version=2)


@pytest.mark.parametrize("state", get_args(RecordState))
def test_stopped_and_failed_are_final(state):
    assert replace(FULL, state=state).is_final == (state in ("stopped", "failed"))


def test_a_record_has_a_file_of_its_own_for_every_run():
    assert FULL.name == "123_4-r1-2.json"
    assert is_record_file_name(FULL.name)
    assert not any(map(is_record_file_name, ["service.json", ".123-r0-0.json.ab.tmp", "123-r0-0.json~", "-r0-0.json"]))
    with pytest.raises(InvalidRequestError):
        _ = replace(FULL, job_id="../../etc/1").name


def test_a_submitted_job_is_written_and_read():
    job = make_submitted(job_id="local-77", pid=77, host="login1", predicted={"weight_bytes": 10**12})
    ended = replace(job, end=JobEnd(state="stopped", reason="it was cancelled", at=2.0))
    text = to_json_text(ended)
    assert from_json_text(SubmittedJob, to_json_text(job), source="job.json") == job
    assert from_json_text(SubmittedJob, text, source="job.json") == ended
    assert job.name == "local-77.json"
    for wrong, says in (
        (text.replace('"stopped"', '"ready"'), r"end\.state is 'ready', not one of failed, stopped"),
        (text.replace("submitted_at", "submitted"), r"job\.json has no field submitted_at"),
    ):
        with pytest.raises(RecordError, match=says):
            from_json_text(SubmittedJob, wrong, source="job.json")


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "-x", "_x", "a/b", "a b", "a\n", "a\0", "ä", "x" * 64, "a;b", "$(a)"]
)
def test_names_that_cannot_be_a_service(name):
    with pytest.raises(InvalidRequestError, match="letters, digits, dots, dashes and underscores"):
        validate_service_name(name)


@pytest.mark.parametrize("name", ["", "a/b", "1\n", "x" * 64])
def test_names_that_cannot_be_a_job(name):
    with pytest.raises(InvalidRequestError, match="no job id"):
        validate_job_id(name)


@pytest.mark.parametrize("name", ["405b", "a", "Llama-70b.test_2", "0", "x" * 63, "123", "123_4", "local-4567"])
def test_names_of_services_and_jobs(name):
    assert (validate_service_name(name), validate_job_id(name)) == (name, name)
