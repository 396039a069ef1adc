"""Scripts: complete, readable, and safe whatever the values are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.hub.hub import find_model
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.options import Environment, EnvironmentKind, JobSettings, SlurmOptions
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from hpc_serve.units import GIB
from tests.unit.submit import service_8b
from tests.unit.submit.service_8b import request

NASTY = ("a'; echo foo", 'a"b', "$(reboot)", "`id`", "a b", "a\\", "*", "{{ model }}", "ü", "#x")


def request_of(alias: str, num_nodes: int | None = None, **fields: Any) -> ServeRequest:
    return request(**{"model": alias, "service": alias, "num_nodes": num_nodes, **fields})


def script(alias: str = "405b", num_nodes: int | None = 2, **fields: Any) -> str:
    return service_8b.script(**{"model": alias, "service": alias, "num_nodes": num_nodes, **fields})


def bash_accepts(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)


BF16 = ("--dtype", "bfloat16")
COMMITTED = {
    "8b": request_of("8b"),
    "70b": request_of("70b"),
    "405b": request_of("405b", 2),
    "r1": request_of("r1", 2, gpu="h200", target="throughput"),
    "gpt-oss-120b": request_of("gpt-oss-120b"),
    "70b-mi300x": request_of("70b", gpu="mi300x"),
    "70b-v6e": request_of("70b", gpu="v6e:2x4"),
    "70b-v5e": request_of("70b", gpu="v5e:4x4"),
    "llama-2-7b-cpu": request_of("llama-2-7b", gpu="cpu-spr-2s", gpu_memory_bytes=256 * GIB, engine_args=BF16),
}


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_scripts_are_what_render_prints(name):
    committed = Path(__file__).parents[3] / "sbatch" / f"{name}.sh"
    asked = COMMITTED[name]
    assert committed.read_text() == render_script(asked, plan_service(asked))
    bash_accepts(committed.read_text())


@pytest.mark.parametrize(("backend", "is_refused"), [("auto", False), ("mp", False), ("ray", True)])
def test_a_server_on_each_node_is_a_word_of_the_line_and_is_checked_before_the_queue(backend, is_refused):
    words = ("--data-parallel-size", "8", "--enable-expert-parallel", "--data-parallel-hybrid-lb")
    refusal = pytest.raises(DoesNotFitError, match=r"a server on each node.* uses ray")
    with refusal if is_refused else contextlib.nullcontext():
        assert "--data-parallel-hybrid-lb \\\n" in script("r1", 2, gpu="h200", backend=backend, engine_args=words)


def test_no_committed_script_is_left_out():
    assert {path.stem for path in (Path(__file__).parents[3] / "sbatch").iterdir()} == set(COMMITTED)


def test_a_share_of_a_cpu_node_is_asked_for_in_cores_and_memory():
    share = SlurmOptions(exclusive=False, cpus_per_task=16)
    lines = script("8b", None, gpu="cpu-genoa", gpu_memory_bytes=64 * GIB, slurm=share).splitlines()
    assert {"#SBATCH --cpus-per-task=16", "#SBATCH --mem=64G"} <= set(lines)
    assert "#SBATCH --exclusive" not in lines


def test_every_option_of_sbatch_is_a_line_of_the_script():
    values: dict[str, Any] = {"str": "1", "int": 7, "bool": True} | {"time": "1:00:00", "signal": "B:USR1@60"}
    options = {one.name: one.type.removesuffix(" | None") for one in fields(SlurmOptions) if "help" in one.metadata}
    given = {name: values.get(name, values[kind]) for name, kind in options.items()}
    lines = script(slurm=SlurmOptions(**given)).splitlines()
    words = {name.replace("_", "-"): "" if value is True else f"={value}" for name, value in given.items()}
    assert {f"#SBATCH --{name}{value}" for name, value in words.items()} <= set(lines)


@pytest.mark.parametrize("kind", ["auto", "venv", "conda", "none", "apptainer"])
@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_every_environment_gives_a_script_that_bash_accepts(kind, cluster):
    bound = {"modules": ("cuda/12.8", "gcc"), "binds": ("/scratch:/scratch",)}
    where = {"cluster": cluster, "num_nodes": 2 if cluster == "slurm" else None, "log_dir": "/logs"}
    environment = Environment(kind=kind, path="/opt/a folder/x", **bound)
    text = script(**where, environment=environment, settings=JobSettings(interface="ib0"))
    bash_accepts(text)
    in_image = "apptainer exec --nv --bind /scratch:/scratch '/opt/a folder/x' python -m hpc_serve.job "
    assert (in_image in text) == (kind == "apptainer")
    assert "module load cuda/12.8\n" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("named", [True, False])
def test_a_strangers_environment_in_the_folder_of_submission_is_not_run(tmp_path, named):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.write_text(f"touch {tmp_path}/was-run; exit 0\n")
    os.chown(activate, 64_999, 64_999)
    environ = {"PATH": os.environ["PATH"], **({"HPC_SERVE_ENV": str(tmp_path / ".venv")} if named else {})}
    text = script(cluster="local", num_nodes=None)
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (tmp_path / "was-run").exists() == named
    assert ("belongs to another user" in done.stderr, done.returncode) == ((False, 0) if named else (True, 78))


def test_a_job_imports_nothing_from_the_folder_of_submission(tmp_path):
    (tmp_path / "argparse.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    text = script(cluster="local", num_nodes=None, environment=Environment(kind="none"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "HPC_SERVE_HOME": str(tmp_path / "home"), "HPC_SERVE_TMPDIR": "/" + "x" * 99}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "is too long" in done.stderr  # our own program ran, and refused that folder
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(("gpu", "flag"), [("h100-80gb", "--nv"), ("mi300x", "--rocm"), ("v5e", None)])
def test_a_container_gets_the_driver_of_the_accelerator(gpu, flag):
    text = script("8b", None, gpu=gpu, environment=Environment(kind="apptainer", path="x.sif"))
    assert f'$(apptainer exec{f" {flag}" if flag else ""} x.sif python -c "$prepare"' in text


RUNTIMES: dict[EnvironmentKind, str] = {
    "apptainer": "apptainer exec --nv --bind /scratch --bind '/a b:/c' '--x=1 2' '/opt/a folder/x' ",
    "pyxis": "srun --nodes=1 --ntasks=1 --relative=0 --overlap --container-image='/opt/a folder/x' "
    "--container-mount-home --no-container-entrypoint "
    "--container-mounts=/tmp:/tmp,/scratch:/scratch,'/a b:/c' '--x=1 2' ",
    "podman-hpc": 'podman-hpc run --rm --env-host --net=host --ipc=host --userns=keep-id --volume="$HOME:$HOME" '
    "--volume=/tmp:/tmp --gpu --volume=/scratch:/scratch --volume='/a b:/c' '--x=1 2' '/opt/a folder/x' ",
    "charliecloud": 'ch-run --set-env="HOME=$HOME" --bind="$HOME:$HOME" --bind=/scratch:/scratch '
    "--bind='/a b:/c' '--x=1 2' '/opt/a folder/x' -- ",
}


def in_image(kind: EnvironmentKind, **fields: Any) -> Environment:
    usual = {"binds": ("/scratch", "/a b:/c"), "container_options": ("--x=1 2",)}
    return Environment(kind=kind, path="/opt/a folder/x", **{**usual, **fields})


@pytest.mark.parametrize("kind", RUNTIMES)
def test_each_container_runtime_runs_all_that_needs_the_image(kind):
    """Three commands run in the image, no environment is activated, and all else is the script without an image."""
    text = script(environment=in_image(kind), slurm=SlurmOptions(requeue=True))
    bash_accepts(text)
    before = RUNTIMES[kind]
    of_step = before if kind != "pyxis" else f"{before.partition('--overlap ')[2]}\\\n        "  # words of srun itself
    without = script(slurm=SlurmOptions(requeue=True))
    expected = re.sub(r"# The Python environment, with hpc-serve.*?\n\n", "\n", without, flags=re.DOTALL)
    for command, words in (("$(python -c ", before), ("$(python -m hpc_serve.job.rerun ", before)):
        assert command in expected
        expected = expected.replace(command, command.replace("python", f"{words}python"))
    launcher = "        python -m hpc_serve.job --service"
    assert launcher in expected
    assert text.splitlines() == expected.replace(launcher, f"        {of_step}{launcher.strip()}").splitlines()


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.parametrize("nasty", NASTY)
def test_what_a_container_is_given_stays_one_word(kind, nasty):
    text = script(environment=in_image(kind, binds=(f"/{nasty}:/x",), container_options=(nasty,)))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert text.count(f" {shlex.quote(nasty)} ") >= 2
    assert text.count(shlex.quote(f"/{nasty}:/x")) == 2


@pytest.mark.parametrize("kind", RUNTIMES)
def test_replicas_of_one_job_run_in_the_container_too(kind):
    text = script("8b", None, environment=in_image(kind), replicas_per_job=2)
    bash_accepts(text)
    assert text.count("'/opt/a folder/x'") == 2


def test_amd_gpus_are_given_to_podman_as_devices():
    text = script("8b", None, gpu="mi300x", environment=in_image("podman-hpc"))
    assert " --device=/dev/kfd --device=/dev/dri " in text
    assert "--gpu " not in text[text.index("podman-hpc") :].partition("python")[0]


@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_site_overrides_the_block_of_a_runtime(tmp_path, kind):
    block = kind.replace("-", "_")
    (tmp_path / "slurm.sh.j2").write_text(
        '{% extends "hpc-serve/slurm.sh.j2" %}{% block ' + block + " %}\nours {{ environment.path }}\n{% endblock %}"
    )
    text = script("8b", None, environment=in_image(kind), templates_dir=str(tmp_path))
    bash_accepts(text)
    assert "exports=$(ours '/opt/a folder/x' python -c" in text


@pytest.mark.parametrize("nasty", NASTY)
def test_whatever_a_value_holds_it_stays_one_word(nasty):
    text = script(
        environment=Environment(kind="conda", path=nasty, modules=(nasty,)),
        settings=JobSettings(tmpdir=nasty),
        engine_args=("--chat-template", nasty),
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    quoted = shlex.quote(nasty)
    assert f"\nconda activate {quoted}\n" in text
    assert f"\nmodule load {quoted}\n" in text
    assert f"\nexport HPC_SERVE_TMPDIR={quoted}\n" in text
    assert f"--chat-template {quoted} \\\n" in text


def test_site_options_become_directives():
    where: dict[str, Any] = {"partition": "gpu", "account": "proj", "qos": "high", "time": "2-00:00:00", "mem": "9G"}
    how: dict[str, Any] = {"gpu_directive": "gres", "gres_type": "h100", "exclusive": False, "cpus_per_task": 7}
    text = script(slurm=SlurmOptions(**where, **how, extra=("--switches=1",)))
    words = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert words == [
        *("--job-name=hpc-serve-405b", "--partition=gpu", "--account=proj", "--qos=high", "--nodes=2"),
        *("--ntasks-per-node=1", "--gres=gpu:h100:8", "--cpus-per-task=7", "--mem=9G", "--time=2-00:00:00"),
        *("--signal=B:USR1@120", "--output=%x-%j.log", "--open-mode=append", "--switches=1"),
    ]


def test_a_site_overrides_one_block_and_keeps_the_rest(tmp_path: Path):
    (tmp_path / "slurm.sh.j2").write_text(
        '{% extends "base.sh.j2" %}{% block modules %}\nmodule --force purge\n{{ super() -}}\n{% endblock %}\n'
    )
    text = script(templates_dir=str(tmp_path), environment=Environment(modules=("cuda",)))
    assert "module --force purge\nmodule load cuda\n" in text


def test_a_site_template_that_asks_for_an_unknown_value_is_refused(tmp_path: Path):
    (tmp_path / "slurm.sh.j2").write_text("{{ no_such_value }}")
    with pytest.raises(InvalidRequestError, match="no_such_value"):
        script(templates_dir=str(tmp_path))


@pytest.mark.parametrize("word", ["include", "extends", "import"])
@pytest.mark.parametrize("writable", ["own.sh.j2", "parts", "parts/more.sh.j2"])
def test_a_template_that_everybody_can_change_is_not_used_however_it_is_named(tmp_path: Path, word: str, writable: str):
    parts = tmp_path / "parts"
    parts.mkdir(mode=0o755)
    (parts / "more.sh.j2").write_text("echo more\n")
    (tmp_path / "own.sh.j2").write_text(
        f'{{% {word} "parts/more.sh.j2" {"as more " if word == "import" else ""}%}}\necho own\n'
    )
    (tmp_path / "slurm.sh.j2").write_text('{% include "own.sh.j2" %}')
    assert "echo " in script(templates_dir=str(tmp_path))
    (tmp_path / writable).chmod(0o777)
    with pytest.raises(InvalidRequestError, match=rf"{writable} can be changed by everybody .*chmod o-w"):
        script(templates_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe|undefined"),
        ('{% include "slurm.sh.j2" %}', "recursion"),
        ("\udcff", "decode"),
    ],
)
def test_a_template_reaches_no_python_and_a_broken_one_is_told(tmp_path: Path, template: str, words: str):
    (tmp_path / "slurm.sh.j2").write_bytes(template.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequestError, match=f"(?s)template slurm.sh.j2 cannot be rendered.*({words})"):
        script(templates_dir=str(tmp_path))


def test_how_often_an_engine_is_started_again_is_in_the_script_where_it_was_said():
    assert "--engine-restarts" not in script()
    text = script(engine_restarts=0)
    assert " --engine-restarts 0 -- \\\n" in text.split("set -euo pipefail")[1]
    assert "hpc-serve render --model 405b --nodes 2 --gpu h100-80gb --engine-restarts 0 " in text
    bash_accepts(text)


def test_options_that_the_pinned_vllm_does_not_know_are_refused_unless_overruled():
    words = ("--new-option", "a", "b")
    with pytest.raises(InvalidRequestError, match=r"has no option --new-option.*--allow-unknown-vllm-options"):
        script(engine_args=words)
    text = script(engine_args=words, allow_unknown_vllm_options=True)
    assert re.search(r"render .* --allow-unknown-vllm-options .* -- --new-option a b\n", text)
    assert "            --new-option a b" in text


def test_a_size_that_the_planner_does_not_know_is_refused_unless_overruled(tmp_path: Path) -> None:
    config = {**find_model("8b").config, "moe_latent_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match=r"moe_latent_size \(1024\).*--allow-unknown-config-keys"):
        script(str(tmp_path), None, service="x")
    text = script(str(tmp_path), None, service="x", allow_unknown_config_keys=True)
    assert re.search(r"render .* --allow-unknown-config-keys ", text)


def test_the_header_cannot_be_left_by_a_newline():
    text = script(engine_args=("--x", "a\nrm -rf ~"), allow_unknown_vllm_options=True)
    assert "\nrm -rf ~ \\" not in text.split("set -euo pipefail")[0]


NEW_DTYPE = ("--kv-cache-dtype", "new")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        *(({"gpu": gpu}, "has no script for it") for gpu in ("gaudi3", "v7x")),
        ({"engine_args": ("--quantization", "int8")}, "name one that is quantised so"),
        ({"engine_args": ("--quantization", "nvfp4")}, "name one that is quantised so"),
        ({"engine_args": ("--max-model-len", "auto")}, "--max-model-len auto"),
        # What the plan needs must be known even if an option is overruled.
        ({"engine_args": NEW_DTYPE, "allow_unknown_vllm_options": True}, "dtype is 'new'.* The plan is made with it"),
        ({"gpu": "cpu", "gpu_memory_bytes": 64 * GIB, "slurm": SlurmOptions(exclusive=False)}, "--cpus-per-task"),
    ],
)
def test_what_has_no_script_is_refused(fields, why):
    with pytest.raises(InvalidRequestError, match=why):
        script("8b", None, **fields)


def test_a_batch_log_that_slurm_opened_for_everybody_is_closed_to_others(tmp_path):
    (line,) = [line for line in script().splitlines() if line.startswith("for log in")]
    log = tmp_path / "batch.log"
    log.touch(mode=0o644)
    null = Path("/dev/null").stat().st_mode
    with log.open("a") as stream:
        subprocess.run(["bash", "-euc", line], stdout=stream, stderr=stream, check=True)
    assert log.stat().st_mode & 0o777 == 0o600
    subprocess.run(["bash", "-euc", line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    assert Path("/dev/null").stat().st_mode == null


def test_the_job_s_own_log_is_above_a_folder_that_is_named_after_the_job():
    text = script(log_dir="/logs/of/%x_%j")
    assert "#SBATCH --output=/logs/of/%j.log\n" in text
    assert "HPC_SERVE_LOG_DIR=/logs/of/%x_%j\n" in text
