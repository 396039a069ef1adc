"""`submit` and `render`: the request that the words make, what is printed, and what a site's own files add."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpc_serve.cli.submit.request import default_service
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.claims import read_wanted
from hpc_serve.submit.services import wait
from tests.unit.cli.test_lists import OURS


@pytest.mark.parametrize("command", ["plan", "render", "submit"])
def test_a_model_needs_no_option_and_sizes_have_vllm_s_short_ones(command, ran):
    assert "TP=2" in ran([command, "8b", "-tp", "2", "-pp", "1"]).out


@pytest.mark.parametrize("command", ["plan", "render"])
def test_options_of_vllm_stand_before_two_dashes_or_after_them(command, ran):
    words = ["-q", "fp8", "--max-num-seqs=16", "--limit-mm-per-prompt.image", "0", "--enforce-eager"]
    lines = (["8b", "-tp", "2", "--", *words], ["-tp", "2", *words, "8b"], [*words[:2], "8b", "-tp=2", *words[2:]])
    printed = {re.sub(r"^# Rendered by.*\n", "", ran([command, *line]).out, flags=re.MULTILINE) for line in lines}
    assert len(printed) == 1


@pytest.mark.parametrize("command", ["plan", "render"])
def test_a_size_for_vllm_has_a_unit(command, ran):
    words = ["--kv-cache-memory-bytes", "10GiB", "--", "--cpu-offload-gb=512MiB"]
    printed = ran([command, "8b", *words]).out
    assert "--kv-cache-memory-bytes 10737418240" in printed
    assert "--cpu-offload-gb 0.5" in printed or "--cpu-offload-gb=0.5" in printed


@pytest.mark.parametrize("command", ["plan", "render", "submit"])
def test_a_gpu_that_nobody_named_is_said_to_be_assumed(command, site, ran):
    words = "no GPU is named, so h100-80gb is assumed"
    assert words in " ".join("".join(ran([command, "8b"])).split())
    assert words not in " ".join("".join(ran([command, "8b", "--gpu", "h100"])).split())
    site("gpu: h100\n")
    assert words not in " ".join("".join(ran([command, "8b"])).split())


def test_a_job_of_this_machine_says_so_too(tmp_path, ran):
    (tmp_path / "env" / "bin" / "activate").write_text("exit 0\n")  # the job ends before it starts an engine
    said = " ".join(ran(["submit", "8b", "--cluster", "local"]).out.split())
    assert "(this machine, TP=1 PP=1)" in said
    assert "no GPU is named, so h100-80gb is assumed" in said


def test_submit_says_what_it_did_what_to_type_next_and_that_a_further_replica_is_one(ran, told):
    out, err = ran(["submit", "8b"])
    assert out.startswith("8b: submitted as job 101 (1 node x 1 GPU, TP=1 PP=1)\n")
    assert "hpc-serve wait 8b" in out
    assert [words for words in ("replicas now", "keeps up across time limits") if words in out] == []
    assert err == ""
    out = ran(["submit", "8b"]).out
    assert "8b has 2 replicas now; it had 1 before, job 101 (pending);" in out
    assert "if that is too many: hpc-serve stop 102" in out
    others = told("submit", "8b")["other_jobs"]
    assert others == [{"job_id": job_id, "state": "pending", "differs": []} for job_id in ("101", "102")]
    assert "keeps up across time limits" in ran(["submit", "8b", "--name", "other", "--keep-up"]).out


MEMORY = "48 GiB of each node = 32 for engine processes + 16 for the model in /dev/shm/hf"


def test_submit_says_what_the_memory_of_a_node_is_for(ran, told):
    words = ["submit", "8b", "--env", "HF_HOME=/dev/shm/hf"]
    assert f"\n  memory  {MEMORY}/hub\n" in ran(words).out
    assert told(*words)["memory"] == f"{MEMORY}/hub"


def test_plan_says_what_the_memory_of_a_node_is_for(ran):
    line = f"- `submit` asks for memory: {MEMORY}."
    for words in (["plan", "8b"], ["plan", "8b", "--explain"]):
        assert line not in " ".join(ran(words).out.split())
        assert line in " ".join(ran([*words, "--", "--download-dir", "/dev/shm/hf"]).out.split())


def test_submit_as_json(told, stand_ins, store):
    found = told("submit", "8b", "--name", "mine", "--seed", "1")
    assert found.pop("weights_note").startswith("meta-llama/Llama-3.1-8B-Instruct: ")
    sizes = ("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    assert found == {
        "service": "mine",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "cluster": "slurm",
        "job_id": "101",
        "is_there": False,
        "machine": "default",
        "replicas": [{"name": "101", "job_id": "101", "log": str(store.log_dir("mine") / "101.log")}],
        "script": str(store.service_dir("mine") / "scripts" / "101_submission.sh"),
        "log": str(store.log_dir("mine") / "101.log"),
        **dict.fromkeys((*sizes, "replicas_wanted"), 1),
        "machines_note": None,
        "queue": "waiting for free nodes (Resources)",
        "other_jobs": [],
    }
    assert "\n            --seed 1" in stand_ins.scripts[0]


def test_a_replica_whose_engine_is_otherwise_says_so(ran, told):
    ran(["submit", "8b"])
    said = ran(["submit", "8b", "--", "--max-num-seqs", "4", "--max-num-batched-tokens=2048"]).out
    assert "its engine is not that of job 101, so answers may differ: --max-num-seqs 4" in said
    others = told("submit", "8b", "--max_num_seqs=4", "--max-num-batched-tokens", "2048")["other_jobs"]
    assert [(one["job_id"], bool(one["differs"])) for one in others] == [("101", True), ("102", False)]


def test_submit_starts_the_replicas_of_a_target_or_those_asked_for(ran, told, stand_ins):
    words = ["submit", "8b", "--target", "throughput", "--nodes", "1"]
    found = told(*words, "--seed", "1")
    assert (found["job_id"], found["replicas_wanted"]) == ("101", 8)
    assert [one["job_id"] for one in found["replicas"]] == [f"101_{task}" for task in range(8)]
    assert "#SBATCH --array=0-7\n" in stand_ins.scripts[0]
    assert "8 replicas, each on 1 node x 1 GPU" in stand_ins.scripts[0]
    out = ran([*words, "--", "--seed", "1"]).out
    assert "8b: submitted as job 102 (8 replicas, each 1 node x 1 GPU, TP=1 PP=1)" in out
    assert "8b has 16 replicas now; it had 8 before" in out
    ran([*words, "--replicas", "2"])
    assert "#SBATCH --array=0-1\n" in stand_ins.scripts[2]
    ran(["submit", "8b", "--replicas", "1"])
    assert "--array" not in stand_ins.scripts[3]


def script_of(ran, *words):
    """The script that `render` prints for the 8b on H100, and its notes."""
    printed = ran(["render", "8b", *words])
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
def test_replicas_of_a_target_share_whole_nodes(words, per_job, tensor, array, ran):
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
def test_gpus_that_stay_idle_are_said_with_what_submit_accepts(words, says, ran, told):
    _, said = script_of(ran, *words)
    assert re.search(says, said)
    cures = [["--no-exclusive"]] + [["--replicas-per-job", "8"]] * ("--replicas-per-job" in said)
    for cure in cures:
        assert "stay idle" not in script_of(ran, *words, *cure)[1]
    assert re.search(says, told("submit", "8b", *words)["machines_note"])


def test_a_hub_cache_in_memory_is_asked_for_and_a_mem_too_small_is_told(ran, told, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/dev/shm/hf")
    assert "#SBATCH --mem=48G\n" in script_of(ran)[0]
    assert "--mem=32G" in script_of(ran, "--env", "HF_HOME=/scratch/hf")[0]
    for said in (script_of(ran, "--mem", "12G")[1], told("submit", "8b", "--mem", "12G")["machines_note"]):
        assert "--mem 12G is 12 GiB of each node, and the job keeps 16 GiB" in said


def test_flags_win_over_the_site_file(site, tmp_path, ran, stand_ins):
    site("partition: gpu\naccount: proj\ntime: 24:00:00\nsbatch_extra: [--switches=1]\n")
    ran(["submit", "8b", "--partition", "short", "--log-dir", str(tmp_path / "logs")])
    options = ("partition=short", "account=proj", "time=24:00:00", "switches=1", f"output={tmp_path}/logs/%j.log")
    assert {f"#SBATCH --{option}" for option in options} <= set(stand_ins.scripts[0].splitlines())


def test_render_prints_the_script_and_touches_nothing(ran, tmp_path, store, stand_ins):
    committed = Path(__file__).parents[3] / "sbatch" / "405b.sh"
    assert ran(["render", "--model", "405b", "--nodes", "2"]).out == committed.read_text()
    ran(["render", "--model", "405b", "--nodes", "2", "--output", str(tmp_path / "x.sh")])
    assert (tmp_path / "x.sh").read_text() == committed.read_text()
    assert "/dev/null/x" in ran(["render", "8b", "--output", "/dev/null/x"], 1).err
    assert not store.home.exists()
    assert stand_ins.scripts == []


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
        script = ran(["render", "8b", *words]).out
        assert (f"export HPC_SERVE_STAGE={value}\n" in script) == (value is not None)
        assert (" --stage" in script) == (value is not None)


@pytest.mark.parametrize(
    "words",
    [
        "70b --target tpot=40ms --gpu mi300x",
        "70b --target throughput --input-tokens 4000 --nodes 2 --gpus-per-node 4",
        "8b -tp 2 -pp 2",
        "8b --concurrency 4",
    ],
)
def test_render_asks_for_the_layout_that_plan_prints(ran, plan, words):
    found, script = plan(*words.split()), ran(["render", *words.split()]).out
    assert " ".join(found["vllm_args"]) in " ".join(script.replace("\\\n", " ").split())
    assert f"#SBATCH --nodes={found['num_nodes']}\n" in script
    assert f"#SBATCH --gpus-per-node={found['gpus_per_node']}\n" in script


def test_plan_is_for_the_machines_that_submit_would_ask_for(site, ran):
    site("gpu: a100-40gb\ngpus_per_node: 4\n")
    assert "2 nodes x 4 a100-40gb, TP=4 x PP=2" in ran(["plan", "--model", "70b"]).out
    assert "2 nodes x 4 GPUs (a100-40gb), TP=4 x PP=2" in ran(["render", "--model", "70b"]).out
    site("gpuu: a100-40gb\n")
    ran(["plan", "--model", "70b"], 2)


@pytest.mark.parametrize("option", [["--max-num-seqs", "16"], ["--max-num-seqs=16"]])
def test_what_the_person_s_own_words_say_is_said_once_and_planned_for(option, ran):
    script = ran(["render", "8b", "--", "-tp", "2", *option]).out
    assert script.count("--max-num-seqs") == 2  # in the comment that tells the command, and in the command
    assert "--tensor-parallel-size" not in script
    assert "#SBATCH --gpus-per-node=2" in script


def test_each_kind_of_failure_has_its_exit_code(stand_ins, ran):
    ran(["submit", "--model", "405b", "--nodes", "1"], 3)
    ran(["submit", "8b", "--name", "x"])
    ran(["submit", "--model", "70b", "--name", "x"], 5)
    stand_ins.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    ran(["submit", "8b"], 4)
    stand_ins.be_silent()
    assert ran(["submit", "8b"], 4).err.startswith("error: ")


def test_submit_and_wait_ends_with_the_failure_of_the_job(stand_ins, ran, monkeypatch, store):
    monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 0.0)
    stand_ins.job("101", "FAILED", exit_code="78:0")
    # The job is in no queue any more when it is first looked for.
    (stand_ins.bin / "squeue").write_text("#!/bin/bash\n")
    assert "exited with code 78" in ran(["submit", "8b", "--wait"], 6).err


def test_ctrl_c_only_detaches(stand_ins, ran, monkeypatch):
    monkeypatch.setattr(wait, "wait", Mock(side_effect=KeyboardInterrupt))
    assert "8b goes on. Come back: hpc-serve wait 8b" in ran(["submit", "8b", "--wait"], 130).err
    assert stand_ins.cancelled == []


@pytest.mark.parametrize("end", ["INT", "TERM", "HUP"])
def test_a_signal_while_sbatch_answers_leaves_no_job_and_no_name(stand_ins, store, end):
    with (stand_ins.bin / "sbatch").open("a") as sbatch:
        sbatch.write(f"kill -{end} $PPID\n")

    def as_on_a_terminal() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nohup and & have some of them ignored
            signal.signal(number, signal.SIG_DFL)

    argv = [sys.executable, "-m", "hpc_serve.cli", "submit", "8b"]
    done = subprocess.run(argv, capture_output=True, check=False, preexec_fn=as_on_a_terminal)
    assert (done.returncode, stand_ins.cancelled) == (130, ["101"])
    assert not (store.service_dir("8b") / "service.json").exists()
    assert read_wanted(store, "8b") is None


def test_a_service_is_named_after_its_model_if_that_gives_a_name():
    models = ("405b", "org/Llama-8B", "/models/a b", "/models/x/config.json", "/models/x/", "./.hidden")
    assert [default_service(model) for model in models] == ["405b", "Llama-8B", "a-b", "x", "x", "hidden"]
    with pytest.raises(InvalidRequestError, match="--name"):
        default_service("/")


def test_a_site_s_model_has_its_name_and_its_options(site, ran, plan):
    site("gpu: h100\n", OURS)
    script = ran(["render", "group-8b", "--", "--max-num-seqs", "4"]).out
    assert '# Serves meta-llama/Llama-3.1-8B-Instruct as "Group-8b"' in script
    engine = script[script.index("vllm serve meta-llama") :]
    assert "--max-num-seqs 4" in engine
    assert "--max-num-seqs 64" not in engine
    assert "--enable-prefix-caching" in engine
    args = plan("group-8b")["vllm_args"]
    assert args[args.index("--max-num-seqs") + 1] == "64"
