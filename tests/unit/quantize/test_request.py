"""The script of a quantisation: what Slurm is asked for, what the program is told, and what is seen of the job."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.quantize.request import QuantizeRequest, directives, program_words, render_quantize_script
from hpc_serve.quantize.submission import Submitted, lines_until_end
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.slurm.slurm import JobState
from hpc_serve.units import GIB


def request(**changes: Any) -> QuantizeRequest:
    usual: dict[str, Any] = {"title": "Qwen/Qwen3-8B", "folder": "/weights/qwen", "output": "/scratch/qwen-int8"}
    usual |= {"scheme": "int8", "venv": "/envs/quantize", "weight_bytes": 10 * GIB, "log_dir": "/home/me/logs"}
    return QuantizeRequest(**{**usual, **changes})


def script(**changes: Any) -> str:
    text = render_quantize_script(request(**changes))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)
    return text


def test_a_job_has_memory_for_all_weights_and_no_gpu_unless_asked() -> None:
    words = "--job-name=hpc-serve-quantize-int8 --nodes=1 --ntasks-per-node=1 --cpus-per-task=8"
    words += " --mem=32G"  # 1.6 times the weights, and 16 GiB
    assert directives(request()) == f"{words} --time=12:00:00 --output=/home/me/logs/%j.log".split()


def test_what_a_site_or_a_person_says_wins() -> None:
    slurm = SlurmOptions(partition="gpu", mem="0", cpus_per_task=2, gpu_directive="gres", gres_type="h100", time="60")
    words = directives(request(gpus=2, slurm=slurm))
    assert {"--partition=gpu", "--mem=0", "--cpus-per-task=2", "--gres=gpu:h100:2", "--time=60"} <= set(words)


def test_the_program_is_told_where_from_where_to_and_how() -> None:
    text = script(scheme="fp8", calibration="/home/me/my texts.jsonl", samples=64, max_tokens=512)
    assert text.rstrip().splitlines()[-1] == (
        "exec srun --ntasks=1 --cpu-bind=none python -m hpc_serve.quantize.program --model /weights/qwen "
        "--output /scratch/qwen-int8 --scheme FP8_DYNAMIC --calibration '/home/me/my texts.jsonl' --samples 64 "
        "--max-tokens 512"
    )
    assert "--calibration" not in program_words(request())


def test_on_this_machine_it_is_no_job_of_slurm() -> None:
    text = script(cluster="local", modules=("cuda/12.8",), env={"HF_HOME": "/scratch/my hf"})
    assert "SBATCH" not in text
    assert "srun" not in text
    assert "module load cuda/12.8" in text
    assert "export HF_HOME='/scratch/my hf'" in text


def test_a_name_cannot_leave_its_comment_or_its_word() -> None:
    text = render_quantize_script(request(title="x\nrm -rf /", folder="/weights/$(touch here)"))
    assert "\nrm" not in text
    assert "--model '/weights/$(touch here)'" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": "out"}, "absolute path"),
        ({"folder": "/a\nb"}, "printable"),
        ({"samples": 0}, "samples is 0"),
        ({"max_tokens": -1}, "max-tokens is -1"),
        ({"gpus": -1}, "gpus is -1"),
        ({"scheme": "int4"}, "use int8 or fp8"),
        ({"log_dir": "/home/me/my logs"}, "log-dir"),
        ({"env": {"HF_TOKEN": "hf_x"}}, "HF_TOKEN"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        request(**changes)


def test_lines_that_came_before_the_first_look_are_seen(tmp_path: Path) -> None:
    log, output = tmp_path / "7.log", tmp_path / "tiny-int8"
    log.write_text("loaded\nrounded\n")
    output.mkdir()
    (output / "config.json").write_text("{}")
    done = Submitted(job_id="7", output=output, log=log, end=lambda: JobState(job_id="7", state="COMPLETED"))
    assert list(lines_until_end(done)) == ["loaded", "rounded"]
