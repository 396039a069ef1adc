"""What is seen of a job that was handed over."""

from __future__ import annotations

from pathlib import Path

from hpc_serve.quantize.submission import Submitted, lines_until_end
from hpc_serve.submit.slurm.slurm import JobState


def test_lines_that_came_before_the_first_look_are_seen(tmp_path: Path) -> None:
    log, output = tmp_path / "7.log", tmp_path / "tiny-int8"
    log.write_text("loaded\nrounded\n")
    output.mkdir()
    (output / "config.json").write_text("{}")
    done = Submitted(job_id="7", output=output, log=log, end=lambda: JobState(job_id="7", state="COMPLETED"))
    assert list(lines_until_end(done)) == ["loaded", "rounded"]
