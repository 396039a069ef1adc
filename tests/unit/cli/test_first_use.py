"""What somebody meets who has not used hpc-serve before: names, guesses, what is assumed, and what is over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_serve.cli.main import run
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record, make_submitted

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def site(tmp_path):
    """Writes the site file."""

    def write(text: str) -> None:
        path = tmp_path / "config" / "hpc-serve" / "site.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def failed_job(store: ServiceStore, job_id: str = "7", **fields) -> None:
    store.write_submitted(make_submitted(service="8b", job_id=job_id, submitted_at=time.time() - 60))
    usual = {"service": "8b", "job_id": job_id, "state": "failed", "reason": "engine exited with 1"}
    store.write(make_record(**{**usual, "updated_at": time.time(), **fields}))


# Words in the order and the place that come to mind


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


# Which GPU


def test_the_accelerators_are_listed_and_the_default_is_named(ran):
    out = ran(["gpus"]).out
    assert all(f"  {entry['name']} " in out for entry in accelerator_entries().values())
    assert "h100-80gb is assumed" in out
    assert "* " not in out


@pytest.mark.parametrize(("gpu", "name"), [("h200", "h200-141gb"), ("v5e:4x4", "v5e"), ("cpu-spr-2s", "cpu-spr")])
def test_the_site_s_own_accelerator_is_marked(gpu, name, site, ran):
    site(f"gpu: {gpu}\n")
    out = ran(["gpus"]).out
    assert f"* {name} " in out
    assert f"the site file's: {gpu}" in out
    assert out.count("* ") == 2


def test_accelerators_by_a_word_and_as_json(ran):
    found = json.loads(ran(["gpus", "mi300", "--json"]).out)
    assert [entry["name"] for entry in found] == ["mi300a", "mi300x"]
    assert found[1]["engine"] == "ROCm"
    assert found[1]["per_node"] == 8
    assert "`hpc-serve gpus` lists all" in ran(["gpus", "zx81"], 1).err


@pytest.mark.parametrize("command", ["plan", "render", "submit"])
def test_a_gpu_that_nobody_named_is_said_to_be_assumed(command, site, ran):
    words = "no GPU is named, so h100-80gb is assumed"
    assert words in " ".join("".join(ran([command, "8b"])).split())
    assert words not in " ".join("".join(ran([command, "8b", "--gpu", "h100"])).split())
    site("gpu: h100\n")
    assert words not in " ".join("".join(ran([command, "8b"])).split())


# What is over


def test_what_is_over_can_be_forgotten(store, ran):
    failed_job(store, "7")
    failed_job(store, "8")
    log = store.log_dir("8b") / "7-node0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("line\n")
    assert ran(["forget", "7"]).out == "Forgotten: 7.\n"
    assert [one["job_id"] for one in json.loads(ran(["status", "--all", "--json"]).out)["services"]] == ["8"]
    assert run(["forget", "8b"]) == 0
    assert "No services" in ran(["status"]).out
    assert log.exists()


@pytest.mark.parametrize("count", [1, 12])
def test_records_are_read_as_often_for_many_jobs_as_for_one(store, count, monkeypatch, ran):
    for number in range(count):
        failed_job(store, str(number))
    opened, read = [], ServiceStore.read
    monkeypatch.setattr(ServiceStore, "read", lambda self, service: opened.append(service) or read(self, service))
    assert len(ran(["forget", "8b"]).out.split(", ")) == count
    assert len(opened) <= 4


def test_what_is_not_over_stays(store, stand_ins, ran):
    failed_job(store, "7")
    store.write_submitted(make_submitted(service="8b", job_id="9", submitted_at=time.time()))
    stand_ins.queue(("9", "PENDING", "Resources"))
    assert "8b (job 9) is pending, not over: hpc-serve stop 9 first." in ran(["forget", "9"], 2).err
    assert ran(["forget", "--ended"]).out == "Forgotten: 7.\n"
    assert ran(["forget", "8b"]).out == "There is nothing to forget: no job is over.\n"
    assert [job.job_id for job in store.read_submitted("8b")] == ["9"]


def test_what_slurm_alone_knows_can_be_forgotten_too(stand_ins, ran):
    stand_ins.job("9", "FAILED", exit_code="1:0", name="hpc-serve-8b")
    assert ran(["forget", "8b"]).out == "Forgotten: 9.\n"
    assert "No services" in ran(["status", "--all"]).out


@pytest.mark.parametrize("words", [["--ended"], ["7"], ["8b"]])
def test_what_is_forgotten_is_hidden_while_slurm_lists_it(store, stand_ins, capsys, ran, words):
    failed_job(store, state="stopped", reason="it was stopped: no request was under way")
    stand_ins.job("7", "COMPLETED", name="hpc-serve-8b")
    stand_ins.queue(("11", "RUNNING", "None"), name="hpc-serve-8b")
    assert run(["forget", *words]) == 0
    for command in (["status", "--all"], ["status", "8b", "--all"], ["doctor", "8b"], ["logs", "8b"]):
        run(command)
        said = "".join(capsys.readouterr())
        assert "ended without an error" not in said
        assert "job 7" not in said
    stand_ins.queue(("7", "PENDING", "Resources"), name="hpc-serve-8b")  # somebody has requeued it
    assert "8b  job 7" in ran(["status", "8b"]).out


def test_a_script_that_slurm_saw_end_without_an_error_has_not_failed(stand_ins, ran):
    stand_ins.job("7", "COMPLETED", name="hpc-serve-8b")
    assert "stopped: its script ended without an error (COMPLETED)" in ran(["status", "8b"]).out


def test_a_long_reason_is_cut_in_the_table_and_whole_in_the_details(store, ran):
    reason = "engine exited with 1: " + " ".join(f"word{n}" for n in range(100))
    failed_job(store, reason=reason, exit_code=137)
    table = " ".join(ran(["status"]).out.split())
    assert "word1 " in table
    assert "word99" not in table
    assert "(hpc-serve doctor 7)" in table
    details = ran(["status", "7"]).out
    assert "word99" in details
    assert "137 (ended by SIGKILL)" in details


# A second replica


def test_a_replica_whose_engine_is_otherwise_says_so(ran):
    ran(["submit", "8b"])
    said = ran(["submit", "8b", "--", "--max-num-seqs", "4", "--max-num-batched-tokens=2048"]).out
    assert "its engine is not that of job 101, so answers may differ: --max-num-seqs 4" in said
    told = ran(["submit", "8b", "--json", "--", "--max_num_seqs=4", "--max-num-batched-tokens", "2048"]).out
    others = json.loads(told)["other_jobs"]
    assert [(one["job_id"], bool(one["differs"])) for one in others] == [("101", True), ("102", False)]


# The site's own models


@pytest.fixture
def site_models(site, tmp_path):
    """Writes the file of the site's own models, and names it in the site file."""

    def write(text: str) -> None:
        (tmp_path / "models.yaml").write_text(text)
        site(f"gpu: h100\nmodels: {tmp_path}/models.yaml\n")

    return write


OURS = """
- name: Group-8b
  model: 8b
  vllm_args: [--max-num-seqs, 64, --enable-prefix-caching]
  note: ours
- {name: 70b, model: Qwen/Qwen3-8B}
"""


def test_a_site_s_model_has_its_name_and_its_options(site_models, ran):
    site_models(OURS)
    script = ran(["render", "group-8b", "--", "--max-num-seqs", "4"]).out
    assert '# Serves meta-llama/Llama-3.1-8B-Instruct as "Group-8b"' in script
    engine = script[script.index("vllm serve meta-llama") :]
    assert "--max-num-seqs 4" in engine
    assert "--max-num-seqs 64" not in engine
    assert "--enable-prefix-caching" in engine
    args = json.loads(ran(["plan", "group-8b", "--json"]).out)["vllm_args"]
    assert args[args.index("--max-num-seqs") + 1] == "64"


def test_it_wins_over_one_of_the_catalogue_and_is_listed_first(site_models, ran):
    site_models(OURS)
    assert 'Serves Qwen/Qwen3-8B as "70b"' in ran(["render", "70b", "--gpu", "h100"]).out
    lines = ran(["models", "8b"]).out.splitlines()
    assert lines[2].split()[:4] == ["Group-8b", "(site)", "8b", "(ours)"]
    (found,) = json.loads(ran(["models", "group", "--json"]).out)
    assert (found["name"], found["aliases"], found["note"]) == ("8b", ["Group-8b"], "ours")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a, modle: b}", "models.yaml:1: unknown setting 'modle'. Did you mean model?"),
        ("- {name: a}", "models.yaml:1: model must be a text"),
        ("- {name: [8], model: b}", "models.yaml:1: name must be one value"),
        ("- {name: a, model: b, vllm_args: {--x: 1}}", "vllm_args must be a list"),
        ("- a", "models.yaml:1 must hold settings"),
        ("a: b", "must be a list of entries"),
        ("- {name: a, model: b}\n- {name: A, model: c}", "A is there twice"),
        ("[", "is not YAML"),
    ],
)
def test_what_cannot_be_in_the_file_is_refused_with_its_place(text, words, site_models, ran):
    site_models(text)
    said = ran(["plan", "8b"], 2).err
    assert words in said
    assert "models.yaml" in said


def test_a_file_of_models_that_is_not_there_is_an_error(site, ran):
    site("models: /nonexistent/models.yaml\n")
    assert "/nonexistent/models.yaml cannot be read" in ran(["models"], 2).err


# Small things that a first hour meets


@pytest.mark.parametrize("command", [["help", "submit"], ["submit", "--help"]])
def test_help_is_a_command_too(command, ran):
    assert ran(command).out.startswith("Usage: hpc-serve submit [OPTIONS] [MODEL]")


def test_help_alone_lists_the_commands(ran):
    assert "submit      Start a model as a service." in ran(["help"]).out


@pytest.mark.parametrize("command", ["plan", "render", "submit", "bench", "quantize"])
def test_a_long_help_begins_with_what_is_used_most_and_lists_each_option_once(command, ran):
    printed = ran(["help", command]).out
    options = [line.split()[0].rstrip(",") for line in printed.splitlines() if line.startswith("  -")]
    assert len(options) == len(set(options))
    headings = [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Most used:"
    first = printed.split("Most used:")[1].split("\n\n")[0]
    assert 6 <= len([line for line in first.splitlines() if line.startswith("  -")]) <= 12


def test_ctrl_c_while_modules_are_imported_prints_no_traceback():
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # the tests may be run with Ctrl-C ignored
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['hpc-serve', 'gpus']\n"
        "from hpc_serve.cli.__main__ import start\n"
        "start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_command_begins_where_ctrl_c_is_quiet():
    setup = (Path(__file__).parents[3] / "setup.cfg").read_text()
    assert "\n    hpc-serve = hpc_serve.cli.__main__:start\n" in setup


def test_paths_are_whole_where_a_program_reads_the_table(store, stand_ins, tmp_path):
    path = f"/{'long-name-of-a-folder/' * 5}model"
    failed_job(store, model=path, reason=f"cannot read {path}/x")
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    told = subprocess.run(
        [sys.executable, "-m", "hpc_serve.cli", "status"], capture_output=True, text=True, env=environ
    )
    assert f"cannot read {path}/x" in told.stdout


def test_a_picture_s_name_is_said(tmp_path, ran):
    page = tmp_path / "plan.html"
    assert ran(["plan", "8b", "--plot", str(page)]).err == f"wrote {page}\n"
    assert page.exists()


def test_the_client_is_there_without_being_imported():
    program = (
        "import sys, hpc_serve\n"
        "assert not {'hpc_serve.client', 'openai', 'httpx'} & set(sys.modules), 'imported'\n"
        "import hpc_serve.client\n"
        "assert hpc_serve.connect is hpc_serve.client.connect\n"
        "assert hpc_serve.connect_async is hpc_serve.client.connect_async\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_submit_says_that_it_keeps_up(ran):
    words = "keeps up across time limits"
    assert words not in ran(["submit", "8b"]).out
    assert words in ran(["submit", "8b", "--name", "other", "--keep-up"]).out


def test_models_that_fit_the_site_s_gpus(site, ran):
    site("gpu: l4\ngpus_per_node: 1\n")
    found = {one["name"]: one["layout"] for one in json.loads(ran(["models", "--fits", "--json", "llama"]).out)}
    assert "meta-llama/Llama-3.1-405B-Instruct" not in found
    for name, layout in found.items():
        plan = json.loads(ran(["plan", name, "--nodes", "1", "--json"]).out)
        assert layout == f"TP={plan['tensor_parallel_size']} PP={plan['pipeline_parallel_size']}"
    assert "No model fits one node of l4" in ran(["models", "--fits", "405b"], 1).err


# What scripts read


@pytest.fixture
def told(ran):
    """What a command says in JSON, by its words."""
    return lambda *words, code=0: json.loads(ran([*words, "--json"], code).out)


def test_commands_that_do_something_answer_in_json_too(told):
    job = told("submit", "8b")["job_id"]
    before = {"service": "8b", "before": 1, "replicas": 1, "submitted": [], "ended": []}
    assert told("scale", "8b", "1") == before
    woken = told("wake", "8b")
    assert (woken["service"], woken["submitted"], bool(woken["note"])) == ("8b", [], True)
    assert [one["job_id"] for one in told("top")["services"]] == [job]
    assert [one["job_id"] for one in told("stop", "8b", "--now")["ended"]] == [job]


def test_init_answers_in_json(tmp_path, told):
    path = tmp_path / "mine.yaml"
    found = told("init", "--output", str(path))
    assert found["file"] == str(path)
    assert path.exists()
    assert all(set(one) == {"value", "reason"} for one in found["settings"].values())


@pytest.mark.parametrize(
    ("words", "code"),
    [(["stop", "none"], 5), (["wake", "none"], 5), (["scale", "none", "1"], 5), (["fetch", "no such/model/at all"], 2)],
)
def test_their_errors_are_json_too(words, code, told):
    assert set(told(*words, code=code)) == {"error", "exit_code"}
