"""The command line: what is printed where, exit codes, and how misspelt words are met."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from hpc_serve.cli import main as cli_main
from hpc_serve.cli.commands import SECONDS
from hpc_serve.cli.main import run
from hpc_serve.cli.submit.request import default_service
from hpc_serve.errors import InvalidRequestError
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.services import stop, wait
from tests.support.stubs import StubService, make_record

HEAVY = ("submitit", "openai", "httpx", "httpx2", "rich", "jinja2", "yaml", "filelock", "ray", "vllm", "torch")
STATUS_KEYS = {
    *("service", "job_id", "state", "cluster", "model", "stand_in", "stage", "progress", "reason", "address", "nodes"),
    *("start", "name", "data_parallel_size", "replicas_per_job", "log_dir", "batch_log", "scheduler_state", "logs"),
    *("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "restart", "replica", "engine"),
    *("submitted_at", "started_at", "updated_at", "failed_part", "exit_code", "last_log_lines", "end_reported_by_job"),
    *("state_since", "engine_restarts", "cache", "loading", "pending_reason", "time_left", "successor"),
    *("successor_job_id", "measured", "predicted", "machine", "weight_version"),
}


@pytest.fixture(autouse=True)
def place(stand_ins, monkeypatch):
    monkeypatch.setattr(wait, "_RECORDS_S", 0.02)
    monkeypatch.setattr(stop, "_RECORDS_S", 0.02)
    return stand_ins


# Help and words that are not known


def test_without_a_command_its_help_is_what_was_asked_for(ran):
    out, err = ran([])
    assert (out.startswith("Usage: hpc-serve"), err) == (True, "")


@pytest.mark.parametrize("argv", [["--help"], ["submit", "--help"], ["status", "-h"], ["chat", "-h"], ["--version"]])
def test_help_is_quick_and_imports_nothing_heavy(argv):
    code = f"import sys; from hpc_serve.cli.main import run; run({argv!r})\nprint(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("Usage: hpc-serve", "hpc-serve, version"))
    assert [name for name in HEAVY if f"'{name}'" in done.stderr] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["submti"], ["no command 'submti'", "Did you mean submit?"]),
        (["zzz"], ["no command 'zzz'", "See: hpc-serve --help"]),
        (["--", "zzz"], ["no command 'zzz'"]),
        (["submit", "--modle", "8b"], ["--modle", "--model"]),
        (["submit", "--model", "8b", "stray"], ["stray"]),
        (["submit", "--model", "8b", "--nodes", "two"], ["--nodes", "two"]),
        (["submit", "--model", "8b", "--nodes", "0"], ["nodes is 0"]),
        (["submit", "--model", "8b", "--backend", "mpi"], ["--backend", "ray"]),
        (["submit", "8b", "--replicas", "0"], ["replicas is 0: it must be at least 1"]),
        (
            ["submit", "8b", "--replicas", "2", "--cluster", "local"],
            ["2 replicas were asked for; leave --replicas out"],
        ),
        *(([name], [f"No model is named: write hpc-serve {name} MODEL"]) for name in ("plan", "render", "submit")),
        (["plan", "8b", "--model", "70b"], ["Two models are named, 8b and 70b"]),
        (["plan", ""], ["No model is named"]),
        (["stop"], ["--replica JOB"]),
        (["submit", "--model", "405bb"], ["405b"]),
        (["submit", "--model", "8b", "--job-name", "a\nb"], ["job-name"]),
        (["submit", "--model", "8b", "--job-name", "a'b"], ["job-name"]),
        (["submit", "--model", "8b", "--name", "a/b"], ["'a/b' cannot name a service"]),
        (["submit", "--model", "8b", "--site", "/nonexistent.yaml"], ["/nonexistent.yaml"]),
        (["submit", "--model", "8b", "--time", "soon"], ["time is 'soon'"]),
        (["submit", "--model", "8b", "--sbatch", "nodashes"], ["nodashes"]),
        (["wait", "8b", "--timeout", "soon"], ["'soon' is no time"]),
        (["chat", "8b", "--max-tokens", "x"], ["--max-tokens"]),
        (["submit", "--model", "8b", "--", "--seed", "1", "--", "x"], ["`--` ends the options for vLLM"]),
        *(
            ([name, "8b", "--", "--max-num-seq", "4"], ["write --max-num-seqs"])
            for name in ("plan", "render", "submit")
        ),
        *(
            ([name, "8b", "--enable-prefx-caching"], ["Did you mean '--enable-prefix-caching'?"])
            for name in ("plan", "render", "submit")
        ),
        (["plan", "8b", "--nodez", "2"], ["Did you mean '--nodes'?"]),
        (["forget"], ["--ended"]),
        (["forget", "8b", "--ended"], ["--ended"]),
        (["help", "sumbit"], ["Did you mean submit?"]),
    ],
)
def test_what_cannot_be_asked_for_is_one_error_on_stderr_and_exit_code_2(argv, words, ran, place):
    out, err = ran(argv, 2)
    assert out == ""
    assert err.startswith("error: ")
    for word in words:
        assert word in err
    assert place.scripts == []


# submit and render


def test_submit_says_what_it_did_and_what_to_type_next(ran, place):
    out, err = ran(["submit", "--model", "8b"])
    assert out.startswith("8b: submitted as job 101 (1 node x 1 GPU, TP=1 PP=1)\n")
    assert "hpc-serve wait 8b" in out
    assert err == ""


MEMORY = "48 GiB of each node = 32 for engine processes + 16 for the model in /dev/shm/hf"


@pytest.mark.parametrize(
    ("words", "says_it"),
    [
        (("--env", "HF_HOME=/dev/shm/hf"), True),
        (("--env", "HF_HOME=/dev/shm/hf", "--mem", "64G"), False),
        (("--env", "HF_HOME=/dev/shm/hf", "--exclusive"), False),
        ((), False),
    ],
)
def test_submit_says_what_the_memory_of_a_node_is_for(words, says_it, ran, place):
    assert (f"\n  memory  {MEMORY}/hub\n" in ran(["submit", "8b", *words]).out) == says_it
    told = json.loads(ran(["submit", "8b", *words, "--json"]).out)
    assert told.get("memory") == (f"{MEMORY}/hub" if says_it else None)


def test_plan_says_what_the_memory_of_a_node_is_for(ran, place):
    line = f"- `submit` asks for memory: {MEMORY}."
    for words in (["plan", "8b"], ["plan", "8b", "--explain"]):
        assert line not in " ".join(ran(words).out.split())
        assert line in " ".join(ran([*words, "--", "--download-dir", "/dev/shm/hf"]).out.split())


def test_submit_as_json(ran, place, store):
    argv = ["submit", "--model", "8b", "--name", "mine", "--json", "--", "--seed", "1"]
    told = json.loads(ran(argv).out)
    assert told.pop("weights_note").startswith("meta-llama/Llama-3.1-8B-Instruct: ")
    assert told == {
        "service": "mine",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "cluster": "slurm",
        "job_id": "101",
        "is_there": False,
        "machine": "default",
        "replicas": [{"name": "101", "job_id": "101", "log": str(store.log_dir("mine") / "101.log")}],
        "script": str(store.service_dir("mine") / "scripts" / "101_submission.sh"),
        "log": str(store.log_dir("mine") / "101.log"),
        "num_nodes": 1,
        "gpus_per_node": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "replicas_wanted": 1,
        "machines_note": None,
        "queue": "waiting for free nodes (Resources)",
        "other_jobs": [],
    }
    assert "\n            --seed 1" in place.scripts[0]


def test_a_further_replica_is_said_to_be_one(ran, place):
    assert "replicas now" not in ran(["submit", "--model", "8b"]).out
    out = ran(["submit", "--model", "8b"]).out
    assert "8b has 2 replicas now; it had 1 before, job 101 (pending);" in out
    assert "if that is too many: hpc-serve stop 102" in out
    others = json.loads(ran(["submit", "--model", "8b", "--json"]).out)["other_jobs"]
    assert others == [{"job_id": job_id, "state": "pending", "differs": []} for job_id in ("101", "102")]


def test_submit_starts_the_replicas_of_a_target(ran, place):
    words = ["submit", "8b", "--target", "throughput", "--nodes", "1", "--", "--seed", "1"]
    told = json.loads(ran([*words[:-3], "--json", *words[-3:]]).out)
    assert told["job_id"] == "101"
    assert [one["job_id"] for one in told["replicas"]] == [f"101_{task}" for task in range(8)]
    assert told["replicas_wanted"] == 8
    assert "#SBATCH --array=0-7\n" in place.scripts[0]
    assert "8 replicas, each on 1 node x 1 GPU" in place.scripts[0]
    out = ran(words).out
    assert "8b: submitted as job 102 (8 replicas, each 1 node x 1 GPU, TP=1 PP=1)" in out
    assert "8b has 16 replicas now; it had 8 before" in out


def script_of(ran, *words):
    """The script that `render` prints for the 8b on H100, and its notes."""
    printed = ran(["render", "--model", "8b", *words])
    return printed.out, " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("words", "per_job", "tensor", "array"),
    [
        (("--target", "throughput", "--exclusive"), 8, 1, None),
        (("--target", "throughput", "--exclusive", "--nodes", "2"), 8, 1, "0-1"),
        (("--target", "throughput", "--exclusive", "--replicas", "24"), 8, 1, "0-2"),
        (("--target", "throughput", "--replicas-per-job", "4"), 4, 2, None),
        (("--target", "tpot=30ms", "--replicas-per-job", "2", "--exclusive"), 2, 4, None),
    ],
)
def test_replicas_of_a_target_share_whole_nodes(words, per_job, tensor, array, ran, place):
    script, said = script_of(ran, *words)
    assert f"--tensor-parallel-size {tensor} " in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert f"each on 1/{per_job} of 1 node x 8 GPUs" in script
    assert (f"#SBATCH --array={array}\n" in script) if array else ("--array" not in script)
    assert "stay idle" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--exclusive",), "7 of 8 GPUs of each node stay idle .*--replicas-per-job 8 fills the node"),
        (("--target", "throughput", "--exclusive", "--replicas", "2"), "7 of 8 GPUs .* leaves them to others.$"),
        (("--exclusive", "--keep-up"), "7 of 8 GPUs of each node stay idle .*--replicas-per-job 8 fills the node"),
    ],
)
def test_gpus_that_stay_idle_are_said_with_what_submit_accepts(words, says, ran, place):
    _, said = script_of(ran, *words)
    assert re.search(says, said)
    cures = [["--no-exclusive"]] + [["--replicas-per-job", "8"]] * ("--replicas-per-job" in said)
    for cure in cures:
        assert "stay idle" not in script_of(ran, *words, *cure)[1]
    assert re.search(says, json.loads(ran(["submit", "8b", "--json", *words]).out)["machines_note"])


def test_a_hub_cache_in_memory_is_asked_for_and_a_mem_too_small_is_told(ran, place, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/dev/shm/hf")
    script, said = script_of(ran)
    assert "#SBATCH --mem=48G\n" in script
    assert "the kernel" not in said.lower()
    assert "--mem=32G" in script_of(ran, "--env", "HF_HOME=/scratch/hf")[0]
    assert "--mem 12G is 12 GiB of each node, and the job keeps 16 GiB" in script_of(ran, "--mem", "12G")[1]
    assert "--mem 12G" in json.loads(ran(["submit", "8b", "--json", "--mem", "12G"]).out)["machines_note"]


def test_the_replicas_asked_for_win_over_the_target_s(ran, place):
    ran(["submit", "8b", "--target", "throughput", "--nodes", "1", "--replicas", "2"])
    assert "#SBATCH --array=0-1\n" in place.scripts[0]
    ran(["submit", "8b", "--replicas", "1"])
    assert "--array" not in place.scripts[1]


def test_flags_win_over_the_site_file(tmp_path, capsys, place):
    folder = tmp_path / "config" / "hpc-serve"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text("partition: gpu\naccount: proj\ntime: 24:00:00\nsbatch_extra: [--switches=1]\n")
    assert run(["submit", "--model", "8b", "--partition", "short", "--log-dir", str(tmp_path / "logs")]) == 0
    lines = place.scripts[0].splitlines()
    for option in ("--partition=short", "--account=proj", "--time=24:00:00", "--switches=1"):
        assert f"#SBATCH {option}" in lines
    assert f"#SBATCH --output={tmp_path}/logs/%j.log" in lines


def test_render_prints_the_script_and_touches_nothing(ran, tmp_path, store, place):
    committed = Path(__file__).parents[3] / "sbatch" / "405b.sh"
    assert ran(["render", "--model", "405b", "--nodes", "2"]).out == committed.read_text()
    ran(["render", "--model", "405b", "--nodes", "2", "--output", str(tmp_path / "x.sh")])
    assert (tmp_path / "x.sh").read_text() == committed.read_text()
    assert "/dev/null/x" in ran(["render", "--model", "8b", "--output", "/dev/null/x"], 1).err
    assert not store.home.exists()
    assert place.scripts == []


def test_a_staged_model_is_the_jobs_setting(ran, tmp_path, monkeypatch):
    site = tmp_path / "site.yaml"
    site.write_text("stage: /dev/shm\n")
    exported = {
        (): None,
        ("--stage",): "on",
        ("--site", str(site)): "/dev/shm",
        ("--stage", "--site", str(site)): "/dev/shm",
        ("--no-stage", "--site", str(site)): None,
    }
    for words, value in exported.items():
        script = ran(["render", "--model", "8b", *words]).out
        assert (f"export HPC_SERVE_STAGE={value}\n" in script) == (value is not None)
        assert (" --stage" in script) == (value is not None)


@pytest.mark.parametrize(
    "words",
    [
        ("70b", "--target", "throughput"),
        ("70b", "--target", "tpot=40ms", "--gpu", "mi300x"),
        ("70b", "--target", "throughput", "--input-tokens", "4000", "--nodes", "2", "--gpus-per-node", "4"),
        ("8b", "-tp", "2", "-pp", "2"),
        ("8b", "--concurrency", "4"),
    ],
)
def test_render_asks_for_the_layout_that_plan_prints(ran, words):
    plan = json.loads(ran(["plan", *words, "--json"]).out)
    script = ran(["render", *words]).out
    options = " ".join(script.replace("\\\n", " ").split())
    assert " ".join(plan["vllm_args"]) in options
    assert f"#SBATCH --nodes={plan['num_nodes']}\n" in script
    assert f"#SBATCH --gpus-per-node={plan['gpus_per_node']}\n" in script


def test_every_sbatch_option_of_the_site_file_is_an_option_of_the_command(ran):
    slurm = ran(["submit", "--help"]).out.split("Options of vLLM")[0]
    names = {option.name for option in fields(SlurmOptions)} - {"gpu_directive", "gres_type", "extra"}
    assert [name for name in names if f"--{name.replace('_', '-')}" not in slurm] == []


@pytest.mark.parametrize("option", [["--max-num-seqs", "16"], ["--max-num-seqs=16"]])
def test_what_the_person_s_own_words_say_is_said_once_and_planned_for(option, ran):
    script = ran(["render", "--model", "8b", "--", "-tp", "2", *option]).out
    assert script.count("--max-num-seqs") == 2  # in the comment that tells the command, and in the command
    assert "--tensor-parallel-size" not in script
    assert "#SBATCH --gpus-per-node=2" in script


def test_each_kind_of_failure_has_its_exit_code(place, ran):
    ran(["submit", "--model", "405b", "--nodes", "1"], 3)
    ran(["submit", "--model", "8b", "--name", "x"])
    ran(["submit", "--model", "70b", "--name", "x"], 5)
    place.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    ran(["submit", "--model", "8b"], 4)
    place.be_silent()
    assert ran(["submit", "--model", "8b"], 4).err.startswith("error: ")


def test_submit_and_wait_ends_with_the_failure_of_the_job(place, ran, monkeypatch, store):
    monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 0.0)
    place.job("101", "FAILED", exit_code="78:0")
    queue = place.bin / "squeue"
    queue.write_text("#!/bin/bash\n")  # the job is in no queue any more when it is first looked for
    assert "exited with code 78" in ran(["submit", "--model", "8b", "--wait"], 6).err


def test_wait_that_takes_too_long_has_exit_code_7(place, ran):
    out, err = ran(["submit", "--model", "8b", "--wait", "--timeout", "0s"], 7)
    assert "submitted as job 101" in out
    assert "pending: waiting for free nodes (Resources)" in err


def test_ctrl_c_only_detaches(place, ran, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(wait, "wait", interrupted)
    assert "8b goes on. Come back: hpc-serve wait 8b" in ran(["submit", "--model", "8b", "--wait"], 130).err
    assert place.cancelled == []


# status, logs, stop


def test_status_of_nothing(ran):
    assert ran(["status"]).out == "No services. Start one: hpc-serve submit --model 8b --wait\n"
    assert json.loads(ran(["status", "--json"]).out) == {"services": [], "problems": [], "wanted": {}}
    assert run(["status", "8b"]) == 5


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_cuts_nothing_and_a_pipe_has_no_colours(columns, store, place, ran, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    name, reason = "a-rather-long-name-of-a-service", "engine exited with 1: CUDA out of memory"
    store.write(make_record(service=name, job_id="123456_12", state="failed", reason=reason))
    out = ran(["status"]).out
    assert max(len(line) for line in out.splitlines()) <= columns
    assert "\x1b" not in out
    joined = "".join(out.split())
    assert all("".join(words.split()) in joined for words in (name, "123456_12", "failed", reason))


def test_status_as_json_has_stable_keys(live, ran, place):
    place.queue(("7", "RUNNING", "None"))
    report = json.loads(ran(["status", "--json"]).out)
    assert set(report) == {"services", "problems", "wanted"}
    assert set(report["services"][0]) == STATUS_KEYS
    assert report["services"][0]["state"] == "ready"


def test_status_shows_what_is_live_and_the_ends_of_the_last_day(store, ran, place):
    now = time.time()
    for service, job_id, ago_s in (("old", "3", 9e5), ("8b", "4", 2 * 86400), ("8b", "1", 300), ("8b", "2", 200)):
        at = {"started_at": now - ago_s, "updated_at": now - ago_s}
        store.write(make_record(service=service, job_id=job_id, state="failed", reason="x", **at))
    for argv, jobs in (
        (["status"], ["1", "2"]),
        (["status", "8b"], ["1", "2"]),
        (["status", "--all"], ["3", "4", "1", "2"]),
        (["status", "8b", "--all"], ["4", "1", "2"]),
        (["status", "old"], ["3"]),
    ):
        assert [status["job_id"] for status in json.loads(ran([*argv, "--json"]).out)["services"]] == jobs


def test_status_of_one_service_says_it_all(store, ran):
    words = ("Traceback (most recent call last):", "ValueError: [x] no memory")
    failed = make_record(
        service="8b",
        job_id="7",
        state="failed",
        failed_part="engine",
        reason="engine exited with 1",
        exit_code=1,
        last_log_lines=words,
        measured={"kv_cache_tokens": 1024.0, "model_loading_bytes": 2.0**30},
        predicted={"kv_cache_tokens": 2048.0, "model_loading_bytes": 2.0**31},
    )
    store.write(failed)
    out = ran(["status", "8b"]).out
    for line in (
        "8b  job 7",
        "  state      failed: engine exited with 1",
        "  exit code  1",
        f"    {words[1]}",
        f"  {'KV cache, tokens':<24}          2,048          1,024",
        f"  {'weights':<24}       2.00 GiB       1.00 GiB",
    ):
        assert f"{line}\n" in out


def test_status_says_since_when_an_engine_is_unresponsive(store, ran):
    words = {"reason": "its engine leaves /health unanswered", "state_since": 1_800_000_000.0, "engine_restarts": 2}
    words["cache"] = "warm, from /tmp/c on this node"
    words["weight_version"] = "step-200"
    words["loading"] = "prefetch: 140.0 GiB on gpfs, 500.0 GiB of memory are free"
    store.write(make_record(service="8b", cluster="local", state="unresponsive", stage="unresponsive", **words))
    out = ran(["status", "8b"]).out
    assert "  state      unresponsive: its engine leaves /health unanswered\n" in out
    assert "  restarts   2, of the engine in place\n" in out
    assert "  weights    version step-200\n" in out
    assert "  caches     warm, from /tmp/c on this node\n" in out
    assert "  loading    prefetch: 140.0 GiB on gpfs, 500.0 GiB of memory are free\n" in out
    assert re.search(r"^  since      2027-01-\d\d \d\d:\d\d:\d\d$", out, re.MULTILINE)


def test_a_record_that_is_not_trusted_is_a_warning(store, ran):
    store.ensure_service("8b")
    (store.service_dir("8b") / "7-r0-0.json").write_text("{")
    assert "7-r0-0.json" in ran(["status"]).err


def test_logs_of_the_latest_job_and_of_one_node(store, ran, place):
    log_dir = store.ensure_service("8b") / "logs"
    for job_id, age_s in (("1", 300), ("2", 200)):
        started = {"state": "stopped", "started_at": time.time() - age_s, "log_dir": str(log_dir)}
        store.write(make_record(service="8b", job_id=job_id, **started))
        for name in (f"{job_id}.log", f"{job_id}-node0.log", f"{job_id}-node1.log"):
            (log_dir / name).write_text(f"first of {name}\nlast of {name}\n")
    blocks = [f"==> {log_dir}/{name} <==\nlast of {name}\n" for name in ("2.log", "2-node0.log", "2-node1.log")]
    out, err = ran(["logs", "8b", "--tail", "1"])
    assert out == "\n".join(blocks)
    assert err == "These are the logs of job 2, which is stopped. 8b also has 1 (stopped): hpc-serve logs JOB\n"
    last = f"==> {log_dir}/1-node1.log <==\nfirst of 1-node1.log\nlast of 1-node1.log\n"
    assert ran(["logs", "1", "--node", "1", "--follow"]).out == last
    assert len(ran(["logs", "8b", "--files"]).out.split()) == 3
    why = f"has no logs of node 5 that this host can see; they would be {log_dir}/2*.log"
    assert why in ran(["logs", "8b", "--node", "5"], 1).err
    ran(["logs", "nonesuch"], 5)


def test_logs_that_went_to_a_place_of_their_own_are_named(store, place, ran, tmp_path, monkeypatch):
    monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 0.0)
    log = tmp_path / "hpc-serve-8b-9.log"
    place.job("9", "FAILED", exit_code="78:0", name="hpc-serve-8b", log=str(log))
    said = ran(["logs", "8b"], 1).err
    assert f"8b (job 9, failed: its script exited with code 78: {exit_code_words(78)} (FAILED)) has no logs" in said
    assert f"they would be {log} and {store.log_dir('8b')}/9*.log" in said
    log.write_text("no Python environment\n")
    assert ran(["logs", "8b"]).out == f"==> {log} <==\nno Python environment\n"
    assert f"Logs: {log}, " in ran(["wait", "8b"], 6).err


def test_stop_tells_how_it_ended(store, place, ran):
    assert run(["submit", "--model", "8b"]) == 0
    place.job("101", "CANCELLED", after_cancel=True)
    out = ran(["stop", "8b"]).out
    assert "Stopping 8b (job 101), which is pending ..." in out
    assert "8b (job 101) is over: stopped: it was cancelled (CANCELLED)" in out
    assert ran(["stop", "8b"]).out == "8b is not running.\n"
    assert "it was cancelled (CANCELLED)" in ran(["status", "8b"]).out


def test_stop_of_one_replica_leaves_the_others(store, place, ran):
    for _ in range(2):
        ran(["submit", "--model", "8b"])
    place.job("102", "CANCELLED", after_cancel=True)
    assert "101" not in ran(["stop", "8b", "--replica", "102"]).out
    assert place.cancelled == ["102"]
    place.job("101", "CANCELLED", after_cancel=True)
    ran(["stop", "--replica", "101", "--now"])
    assert place.cancelled == ["102", "101"]
    assert "8b has no replica 99" in ran(["stop", "8b", "--replica", "99"], 2).err


def test_stop_tells_clients_of_a_job_that_was_cancelled_by_other_means(store, place, ran):
    assert run(["submit", "--model", "8b"]) == 0
    place.queue()
    place.job("101", "CANCELLED", nodes="")
    assert "Wait for it" in ran(["chat", "8b", "hi"], 5).err
    assert run(["stop", "8b"]) == 0
    assert "8b is stopped: it was cancelled before it began" in ran(["chat", "8b", "hi"], 5).err


# env and chat


def test_env_prints_lines_that_a_shell_takes(live, store, ran):
    line = ran(["env", "8b"]).out + 'printf "%s %s" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"https://127.0.0.1:{live.engines[0].port}/v1 {store.read_api_key('8b')}"
    assert set(json.loads(ran(["env", "--json"]).out)) == {"service", "model", "base_url", "api_key", "variables"}
    assert ran(["env", "70b"], 5).out == "", "nothing to evaluate"


def test_chat_asks_once(live, ran, monkeypatch):
    assert ran(["chat", "8b", "hello", "--max-tokens", "3"]).out.startswith(f"stub-{live.engines[0].port}")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert "There is no question" in ran(["chat", "8b"], 2).err
    live.engines[0].kill()
    assert ran(["chat", "8b", "hello"], 5).err.startswith("error: "), "no traceback"


def test_a_service_without_a_chat_says_how_it_is_asked(store, ran):
    service = StubService(store.home, "emb")
    service.start("--stub-error", "404", service="emb", job_id="8")
    try:
        said = ran(["chat", "emb", "hello"], 1).err
    finally:
        service.close()
    assert "emb has no chat: its engine generates no text" in said
    assert 'hpc_serve.connect("emb")' in said
    assert "client.embeddings.create" in said


def test_a_question_without_a_service_s_name_is_told_where_that_belongs(live, ran):
    assert "a service's name comes first: hpc-serve chat 8b hi" in ran(["chat", "hi"], 5).err
    assert ran(["chat", "why?", "--max-tokens", "1"]).out.startswith("stub-")  # no service has such a name
    live.engines[0].kill()
    assert "hpc-serve chat SERVICE hi" in ran(["chat", "hi"], 5).err
    assert "comes first" not in ran(["chat", "8b"], 5).err


# The rest


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["status", "nonesuch", "--json"], 5, "No service or job 'nonesuch'"),
        (["wait", "nonesuch", "--json"], 5, "nonesuch"),
        (["wait", "--json"], 2, "Missing argument"),
        (["env", "nonesuch", "--json"], 5, "No service 'nonesuch'"),
        (["submit", "--model", "8bb", "--json"], 2, "8bb"),
        (["plan", "--model", "8b", "--json", "--gpuu", "x"], 2, "--gpu"),
    ],
)
def test_an_error_of_a_command_that_answers_in_json_is_json(argv, code, words, ran):
    out, err = ran(argv, code)
    answer = json.loads(out)
    assert set(answer) == {"error", "exit_code"}
    assert answer["exit_code"] == code
    assert words in answer["error"]
    assert err.startswith(f"error: {answer['error']}")


def test_there_is_one_json_document_only(place, ran):
    assert json.loads(ran(["submit", "--model", "8b", "--wait", "--timeout", "0s", "--json"], 7).out)["job_id"] == "101"
    assert ran(["submit", "--model", "8bb", "--", "--json"], 2).out == "", "it is the engine's word"


@pytest.mark.parametrize("argv", ["models --json", "--help", "status"])
def test_output_that_cannot_be_written_is_a_plain_error(argv):
    done = in_bash(f"{argv} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device.\n")


def in_bash(words):
    command = f"{shlex.quote(sys.executable)} -m hpc_serve.cli {words}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


def test_nobody_need_listen():
    done = in_bash("status >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = in_bash("models | true; echo ${PIPESTATUS[0]}")
    assert done.stdout in ("141\n", "0\n")  # 0 if it had written all before the reader went
    assert done.stderr == ""


def test_models_lists_the_catalogue(ran):
    out = ran(["models"]).out
    assert "meta-llama/Llama-3.1-405B-Instruct" in out.replace("\n", "")
    assert max(map(len, out.splitlines())) <= 80
    (entry,) = [e for e in json.loads(ran(["models", "405b", "--json"]).out) if "405b" in e["aliases"]]
    assert entry["published_parameters"] > 405e9
    assert run(["models", "no-such-model"]) == 1


@pytest.mark.parametrize(
    ("model", "service"),
    [
        ("405b", "405b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("/models/a b", "a-b"),
        ("/models/x/config.json", "x"),
        ("/models/x/", "x"),
        ("./.hidden", "hidden"),
    ],
)
def test_a_service_is_named_after_its_model(model, service):
    assert default_service(model) == service


def test_what_gives_no_name_is_asked_for_one():
    with pytest.raises(InvalidRequestError, match="--name"):
        default_service("/")


def test_durations():
    assert [SECONDS.read(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "-1", "1d", "1h30m"):
        with pytest.raises(ValueError, match="is no time"):
            SECONDS.read(text)


def test_a_bug_is_told_as_one_and_shows_where_if_asked(monkeypatch, capsys, ran):
    def broken(**_):
        raise RuntimeError("oops")

    monkeypatch.setattr(cli_main.cli, "main", broken)
    assert "unexpected RuntimeError: oops" in ran(["status"], 70).err
    monkeypatch.setenv("HPC_SERVE_DEBUG", "1")
    run(["status"])
    assert "in broken" in capsys.readouterr().err


def test_plan_is_for_the_machines_that_submit_would_ask_for(monkeypatch, tmp_path, ran):
    site = tmp_path / "site.yaml"
    site.write_text("gpu: a100-40gb\ngpus_per_node: 4\n")
    monkeypatch.setenv("HPC_SERVE_SITE", str(site))
    assert "2 nodes x 4 a100-40gb, TP=4 x PP=2" in ran(["plan", "--model", "70b"]).out
    assert "2 nodes x 4 GPUs (a100-40gb), TP=4 x PP=2" in ran(["render", "--model", "70b"]).out
    site.write_text("gpuu: a100-40gb\n")
    assert run(["plan", "--model", "70b"]) == 2
