"""Hands a quantisation over: finds the model's weights, checks what can be checked before the queue, submits, follows.

request.py holds the request; program.py is the job itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, ServiceFailedError
from hpc_serve.hub.hub import FoundModel, find_model
from hpc_serve.hub.local_weights import missing_weights, weight_files
from hpc_serve.quantize.request import QuantizeRequest, render_quantize_script
from hpc_serve.rendezvous.files import make_log_dir, make_private_folder
from hpc_serve.rendezvous.store import process_start_time
from hpc_serve.submit.logs import follow, tail
from hpc_serve.submit.plans.preflight import is_repository
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import GONE, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence

_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than the log is read
_LAST_LINES = 5
_FIRST_LINES = 10_000  # what a job has written before its log is first looked at
_CAUSAL = "ForCausalLM"


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A quantisation that was handed over. `end` asks how its job has ended; None while it has not."""

    job_id: str
    output: Path
    log: Path
    end: Callable[[], JobState | None]


def find_weights(name: str, environ: Mapping[str, str]) -> tuple[str, Path, int]:
    """Return the model's name for people, the folder in which all its weights lie here, and their bytes.

    `name` is a catalogue name, a repository or a folder. Raises UnknownModelError, and InvalidRequestError where the
    weights are not here, are not all there, or are of a kind that is not quantised: quantised already, or no plain
    language model.
    """
    found = find_model(name, environ=environ)
    folder = found.folder
    missing = missing_weights(folder)
    if folder is None or missing is not None:
        words = missing.words if missing is not None else "none of its weights"
        cure = "If they are elsewhere, set HF_HOME, or name their folder as the model."
        if is_repository(found.name):
            cure = f"Get them first: `hpc-serve fetch {found.name}`. {cure}"
        raise InvalidRequestError(f"{found.name}: there are {words} here, and the job fetches none. {cure}")
    _check_kind(found)
    return found.name, folder.absolute(), sum(path.stat().st_size for path in weight_files(folder))


def _check_kind(found: FoundModel) -> None:
    if "quantization_config" in found.config or "compression_config" in found.config:
        raise InvalidRequestError(f"{found.name} is quantised already, its config.json says; name one of 16 bit.")
    architectures = found.config.get("architectures") or [""]
    if not str(architectures[0]).endswith(_CAUSAL):
        raise InvalidRequestError(
            f"{found.name} is a {architectures[0] or 'model of no known kind'}: hpc-serve quantises plain language "
            f"models (…{_CAUSAL}). For others llm-compressor has recipes of their own."
        )


def check_paths(request: QuantizeRequest) -> None:
    """Raise InvalidRequestError where the folder is there already, or the environment or the texts are not."""
    if os.path.lexists(request.output):
        raise InvalidRequestError(
            f"{request.output} is there already; remove it, or name another folder with --output."
        )
    venv = request.venv
    if not (Path(venv) / "bin" / "activate").is_file():
        raise InvalidRequestError(
            f"There is no Python environment in {venv} (no bin/activate). Quantisation needs its own: python3 -m "
            f"venv {venv}, then {venv}/bin/pip install -r envs/quantize/requirements.txt . in a checkout of hpc-serve."
        )
    if request.calibration is not None and not os.access(request.calibration, os.R_OK):
        raise InvalidRequestError(f"--calibration {request.calibration} cannot be read.")


def submit(request: QuantizeRequest, home: Path) -> Submitted:
    """Give the script to sbatch, or run it on this machine. Raises HpcServeError of every kind."""
    from hpc_serve.submit.slurm import executor

    script = render_quantize_script(request)
    make_private_folder(home)
    log_dir = make_log_dir(Path(request.log_dir), called="--log-dir")
    scripts = make_private_folder(home / "quantize" / "scripts")
    if request.cluster == "local":
        pid, _ = executor.start_locally(script, scripts, log_dir)
        job_id, end = f"local-{pid}", partial(_end_of_process, pid, process_start_time(pid))
    else:
        job_id, _ = executor.submit_to_slurm(script, scripts)
        end = partial(_end_of_job, job_id, SchedulerView(max_age_s=_SCHEDULER_S))
    return Submitted(job_id=job_id, output=Path(request.output), log=log_dir / f"{job_id}.log", end=end)


def _end_of_process(pid: int, started: int | None) -> JobState | None:
    is_alive = started is not None and process_start_time(pid) == started
    return None if is_alive else JobState(job_id=f"local-{pid}", state=GONE, source="process")


def _end_of_job(job_id: str, slurm: SchedulerView) -> JobState | None:
    state = slurm.state(job_id)
    return state if state.is_over else None


def lines_until_end(submitted: Submitted) -> Iterator[str]:
    """Yield the lines of the job's log as they come, until it has ended.

    Raises ServiceFailedError where the output is not there then.
    """
    ends: list[JobState | None] = [None]

    def is_over() -> bool:
        ends.append(submitted.end())
        return ends[-1] is not None

    for _, line in follow(lambda: [submitted.log], first_lines=_FIRST_LINES, is_over=is_over):
        yield line.rpartition("\r")[2]
    if not (submitted.output / "config.json").is_file():
        ended, said = ends[-1], [line for line in tail(submitted.log, _LAST_LINES) if line.strip()]
        how = ended_sentence(ended) if ended is not None else "it has ended"
        raise ServiceFailedError(
            f"job {submitted.job_id} has not made {submitted.output}: {how}. "
            + (f"It last wrote: {said[-1].rpartition(chr(13))[2].strip()} " if said else "")
            + f"Its log: {submitted.log}"
        )
