"""Scripts: complete, readable, and safe whatever the values are."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub import find_model
from hpc_serve.plan import ClusterSpec, ServePlan, accelerator, model_from_config, plan
from hpc_serve.submit.render import render_argv, render_script
from hpc_serve.submit.request import Environment, JobSettings, ServeRequest, SlurmOptions

NASTY = ("a'; echo foo", 'a"b', "$(reboot)", "`id`", "a b", "a\\", "*", "{{ model }}", "ü", "#x")


def plan_of(alias: str, num_nodes: int | None = None) -> ServePlan:
    found = find_model(alias)
    spec = model_from_config(found.config, name=found.name)
    cluster = ClusterSpec(accelerator=accelerator("h100-80gb"), num_nodes=num_nodes)
    return plan(spec, cluster, served_model_names=found.served_model_names)


def script(alias: str = "405b", num_nodes: int | None = 2, **fields) -> str:
    return render_script(
        ServeRequest(**{"model": alias, "service": alias, "num_nodes": num_nodes, **fields}), plan_of(alias, num_nodes)
    )


def bash_accepts(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)


@pytest.mark.parametrize(("alias", "num_nodes"), [("8b", None), ("70b", None), ("405b", 2)])
def test_the_committed_scripts_are_what_render_prints(alias, num_nodes):
    committed = Path(__file__).parents[2] / "sbatch" / f"{alias}.sh"
    assert committed.read_text() == script(alias, num_nodes)


@pytest.mark.parametrize(
    ("alias", "num_nodes", "directives", "options"),
    [
        ("8b", None, ["--nodes=1", "--gpus-per-node=1"], ["--tensor-parallel-size 1"]),
        ("70b", None, ["--nodes=1", "--gpus-per-node=4"], ["--tensor-parallel-size 4"]),
        ("405b", 2, ["--nodes=2", "--gpus-per-node=8"], ["--tensor-parallel-size 8", "--pipeline-parallel-size 2"]),
    ],
)
def test_a_script_asks_slurm_for_what_the_engine_is_told_to_use(alias, num_nodes, directives, options):
    text = script(alias, num_nodes)
    assert all(f"#SBATCH {line}\n" in text for line in directives)
    assert all(f"{option} \\\n" in text for option in options)


@pytest.mark.parametrize("kind", ["auto", "venv", "conda", "none", "apptainer"])
@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_every_environment_gives_a_script_that_bash_accepts(kind, cluster):
    environment = Environment(
        kind=kind, path="/opt/a folder/x", modules=("cuda/12.8", "gcc"), binds=("/scratch:/scratch",)
    )
    nodes = 2 if cluster == "slurm" else None
    text = script(
        cluster=cluster,
        num_nodes=nodes,
        environment=environment,
        settings=JobSettings(interface="ib0"),
        log_dir="/logs",
    )
    bash_accepts(text)
    assert ("apptainer exec --nv --bind /scratch:/scratch '/opt/a folder/x' python -m hpc_serve.job " in text) == (
        kind == "apptainer"
    )
    assert "module load cuda/12.8\n" in text


@pytest.mark.parametrize(("gpu", "flag"), [("h100-80gb", "--nv"), ("mi300x", "--rocm"), ("v5e", None)])
def test_a_container_gets_the_driver_of_the_accelerator(gpu, flag):
    line = next(
        line
        for line in script(gpu=gpu, environment=Environment(kind="apptainer", path="x.sif")).splitlines()
        if "hpc_serve.job.prepare" in line
    )
    assert {word for word in line.split() if word in ("--nv", "--rocm")} == ({flag} if flag else set())


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


@pytest.mark.parametrize("name", ["job_name", "partition", "account", "qos", "constraint", "mem"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a b", "a'b", 'a"b', "", "$HOME"])
def test_what_cannot_stand_in_a_directive_is_refused(name, value):
    with pytest.raises(InvalidRequestError, match=name.replace("_", "-")):
        SlurmOptions(**{name: value})


@pytest.mark.parametrize("word", ["no-dashes", "--x=a\nb", "--x=a b", "-", "--"])
def test_an_extra_directive_is_checked_too(word):
    with pytest.raises(InvalidRequestError, match="extra sbatch option"):
        SlurmOptions(extra=(word,))


def test_site_options_become_directives():
    options = SlurmOptions(
        partition="gpu",
        account="proj",
        qos="high",
        time="2-00:00:00",
        gpu_directive="gres",
        gres_type="h100",
        exclusive=False,
        mem="100G",
        cpus_per_task=7,
        extra=("--switches=1",),
    )
    lines = [line for line in script(slurm=options).splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "#SBATCH --job-name=hpc-serve-405b",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=proj",
        "#SBATCH --qos=high",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:h100:8",
        "#SBATCH --cpus-per-task=7",
        "#SBATCH --mem=100G",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --switches=1",
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


def test_the_header_says_how_to_get_the_script_again():
    request = ServeRequest(
        model="405b", service="big", num_nodes=2, tensor_parallel_size=8, backend="mp", engine_args=("--seed", "1")
    )
    assert shlex.join(render_argv(request)) == (
        "hpc-serve render --model 405b --name big --nodes 2 --tensor-parallel-size 8 --backend mp -- --seed 1"
    )


def test_the_header_cannot_be_left_by_a_newline():
    text = script(engine_args=("--x", "a\nrm -rf ~"))
    assert "\nrm -rf ~ \\" not in text.split("set -euo pipefail")[0]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_nodes": 0}, "nodes is 0"),
        ({"tensor_parallel_size": -1}, "tensor-parallel-size is -1"),
        ({"backend": "mpi"}, "auto, ray or mp"),
        ({"cluster": "local", "num_nodes": 2}, "this machine alone"),
        ({"log_dir": "logs"}, "absolute path"),
        ({"log_dir": "/a b"}, "log-dir"),
    ],
)
def test_a_request_that_cannot_be_is_refused(fields, why):
    with pytest.raises(InvalidRequestError, match=why):
        ServeRequest(model="8b", service="8b", **fields)
