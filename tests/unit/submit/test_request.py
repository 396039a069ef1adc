"""A request, sbatch's options and a job's variables: what is refused without a plan, and whose variable wins."""

from __future__ import annotations

import subprocess

import pytest

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.submit.request.options import Environment, JobSettings, SlurmOptions, check_env, expanded, parse_env
from hpc_serve.submit.script.render import render_argv
from hpc_serve.submit.services import services
from hpc_serve.submit.site.site_files import load_site_models, read_site
from tests.unit.submit.service_8b import request, script

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
        ({"log_dir": "/a home/logs"}, "--log-dir; by default below HPC_SERVE_HOME"),
        ({"log_dir": "/a b"}, "log-dir"),
        ({"log_dir": "/logs/%x_%N"}, "of Slurm's patterns"),
        *(({"machine": name}, "machine is ") for name in ("", "a b", "../x", "a100\n#SBATCH --qos=x")),
        # replicas whose jobs submit others
        ({"replicas": 1, "max_replicas": 0}, "Write 1:1"),
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hf_abc"),
        ("OPENAI_API_KEY", "x" * 8),
        ("AWS_SECRET_ACCESS_KEY", "abcdefgh"),
        ("DB_PASS", "letmein"),
        ("WHATEVER", "hf_abcdefghijklmnopqrst"),
        ("https_proxy", "http://me:letmein@proxy:3128"),
    ],
)
def test_a_secret_is_refused_with_what_to_do_and_without_its_value(name, value):
    with pytest.raises(InvalidRequestError, match=f"env: {name} looks like a secret") as caught:
        check_env({name: value})
    assert "hf auth login" in str(caught.value)
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HOME", "/dev/shm/hf"),
        ("HF_TOKEN_PATH", "/home/me/token"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "163840"),
        ("https_proxy", "http://proxy.example:3128"),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1"),
        ("MOTTO", 'it\'s $5, "really" `true`'),
    ],
)
def test_what_is_no_secret_stands(name, value):
    check_env({name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("A-B", "1", "no name of a variable"),
        ("", "1", "no name of a variable"),
        ("1A", "1", "no name of a variable"),
        ("A\nB", "1", "no name of a variable"),
        ("A", "1\n2", "one line"),
        ("SLURM_JOB_ID", "7", "Slurm's to set"),
        ("CUDA_VISIBLE_DEVICES", "0", "Slurm's to set"),
        ("HPC_SERVE_HOME", "/x", "where you submit"),
    ],
)
def test_what_cannot_be_set_is_refused(name, value, words):
    with pytest.raises(InvalidRequestError, match=words):
        check_env({name: value})


def test_words_of_the_command_line():
    assert parse_env(["A=1", "B=", "A=x=y"]) == {"A": "x=y", "B": ""}
    with pytest.raises(InvalidRequestError, match="--env A: write it as --env NAME=VALUE"):
        parse_env(["A"])


def test_variables_of_whoever_submits_are_put_in():
    env = {"A": "${X}/b", "B": "$X$Y", "C": "$$X", "D": "$(X)"}
    assert expanded(env, {"X": "1", "Y": "2"}) == {"A": "1/b", "B": "12", "C": "$X", "D": "$(X)"}
    with pytest.raises(InvalidRequestError, match=r"env: A uses \$X, which is not set here"):
        expanded(env, {})


def test_a_site_file_holds_them(site_of):
    found = site_of("env:\n  HF_HOME: $SCRATCH/hf\n  NCCL_DEBUG: 1\n  SWITCH: on\n")
    assert found.env == {"HF_HOME": "$SCRATCH/hf", "NCCL_DEBUG": "1", "SWITCH": "on"}
    assert site_of("env:\n").env == {}


@pytest.mark.parametrize("text", ["env: [A]", "env: A", "env: {A: [1]}", "env: {A: {B: 1}}", "env: {[A]: 1}"])
def test_what_is_no_list_of_variables_is_refused(site_of, text):
    with pytest.raises(SiteFileError, match=r"site.yaml:1: env must hold variables, as \{NAME: value\}"):
        site_of(text)


def test_a_secret_in_a_site_file_is_said_with_the_file(site_of):
    with pytest.raises(SiteFileError, match=r"site.yaml: env: HF_TOKEN looks like a secret"):
        site_of("env: {HF_TOKEN: hf_abc}")


def test_variables_of_both_site_files_are_merged_one_by_one(tmp_path):
    (tmp_path / "system.yaml").write_text("env: {A: system, B: system}")
    (tmp_path / "system.yaml").chmod(0o644)
    (tmp_path / "own.yaml").write_text("env: {B: own, C: own}")
    environ = {"HPC_SERVE_SYSTEM_SITE": str(tmp_path / "system.yaml"), "XDG_CONFIG_HOME": str(tmp_path)}
    assert read_site(environ, str(tmp_path / "own.yaml")).env == {"A": "system", "B": "own", "C": "own"}
    (tmp_path / "own.yaml").write_text("env:\n")
    assert read_site(environ, str(tmp_path / "own.yaml")).env == {}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("env: [A]", "env must hold variables"),
        ("env: {HF_TOKEN: hf_abc}", "looks like a secret"),
        (r'note: "a\e[2Jb"', "note is .*printable"),
    ],
)
def test_a_site_s_model_has_its_own(tmp_path, entry, words):
    path = tmp_path / "models.yaml"
    path.write_text("- {name: big, model: 70b, env: {A: 1, B: true}}")
    assert load_site_models(str(path))["big"].env == {"A": "1", "B": "true"}
    path.write_text("- {name: big, model: 70b, " + entry + "}")
    with pytest.raises(SiteFileError, match=f"models.yaml:1: .*{words}"):
        load_site_models(str(path))


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_the_script_exports_them_word_for_word(tmp_path, cluster):
    nasty = 'it\'s $HOME `id` "x" \\ # *'
    settings = JobSettings(tmpdir="/local")
    asked = {"cluster": cluster, "env": {"A": nasty, "HPC_SERVE_TMPDIR": "/x"}, "settings": settings}
    lines = [line for line in script(**asked).splitlines() if line.startswith("export ")]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'printf %s "$A"'])], capture_output=True, text=True, check=True
    )
    assert done.stdout == nasty
    assert "export HPC_SERVE_TMPDIR=/local" in lines  # a setting of its own wins
    assert f"A={nasty}" in render_argv(request(**asked))


def test_a_service_s_variable_wins_over_its_model_s_and_that_over_the_site_s(tmp_path, monkeypatch, ran):
    monkeypatch.setenv("SCRATCH", "/scratch/alice")
    monkeypatch.setenv("HPC_SERVE_SYSTEM_SITE", "")
    (tmp_path / "models.yaml").write_text("- {name: own, model: 8b, env: {B: model, C: model}}")
    (tmp_path / "site.yaml").write_text(f"models: {tmp_path}/models.yaml\nenv: {{A: $SCRATCH/a, B: site, C: site}}\n")
    script = ran(["render", "own", "--site", str(tmp_path / "site.yaml"), "--env", "C=service"]).out
    assert "\nexport A=/scratch/alice/a\nexport B=model\nexport C=service\n" in script
    assert "hf_abc" not in ran(["render", "8b", "--env", "HF_TOKEN=hf_abc"], 2).err


def test_weights_are_looked_for_where_the_job_will_look(tmp_path):
    offline = {"HF_HOME": "/dev/shm/hf", "HF_HUB_OFFLINE": "1"}
    environ = {"HF_HOME": "/home/me/hf", "HPC_SERVE_HOME": str(tmp_path)}
    with pytest.raises(InvalidRequestError, match="/dev/shm/hf/hub holds none of its weights"):
        services.submit(request(env=offline, **LOCAL, environment=Environment(kind="none")), environ=environ)
