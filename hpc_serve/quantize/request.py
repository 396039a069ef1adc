"""A quantisation as asked for, checked as far as that is possible without a cluster, and the script of its job. Pure.

submission.py finds the folder of the weights and checks that they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.request.options import SlurmOptions, check_choice, check_directive, check_env
from hpc_serve.submit.request.request import Cluster
from hpc_serve.submit.script.render import program_directives, render_program
from hpc_serve.units import GIB

Scheme = Literal["int8", "fp8"]
SCHEMES: Mapping[Scheme, str] = {"int8": "INT8", "fp8": "FP8_DYNAMIC"}
"""llm-compressor's names. Both have a scale for each output channel of a weight and for each token of an activation."""

_JOB_BASE_BYTES = 16 * GIB  # Python, torch, and the tensor that is written
_CPUS = 8
_OUTPUT = re.compile(r"[^\x00-\x1f\x7f]+")


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """One model to quantise. `folder` holds its weights of `weight_bytes`, `output` shall hold the quantised ones.

    `title` is the model's name for people. `calibration` is a JSONL file of texts; `samples` texts of at most
    `max_tokens` each are used. Without `calibration`, weights are rounded as they are. `venv` is the folder of the
    environment that has llm-compressor.
    """

    title: str
    folder: str
    output: str
    scheme: Scheme
    venv: str
    weight_bytes: float
    calibration: str | None = None
    samples: int = 512
    max_tokens: int = 2048
    gpus: int = 0
    cluster: Cluster = "slurm"
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    modules: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: str
    templates_dir: str | None = None

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, Scheme)
        check_env(self.env)
        check_directive("log-dir", self.log_dir)
        for name in ("samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1.")
        if self.gpus < 0:
            raise InvalidRequestError(f"gpus is {self.gpus}: it must be at least 0.")
        for called, path in (("the model's folder", self.folder), ("output", self.output)):
            if not path.startswith("/") or not _OUTPUT.fullmatch(path):
                raise InvalidRequestError(f"{called} is {path!r}: it must be an absolute path of printable characters.")


def program_words(request: QuantizeRequest) -> tuple[str, ...]:
    """Return the words of the program in the job."""
    words = ["--model", request.folder, "--output", request.output, "--scheme", SCHEMES[request.scheme]]
    if request.calibration is not None:
        words += ["--calibration", request.calibration]
        words += ["--samples", str(request.samples), "--max-tokens", str(request.max_tokens)]
    return tuple(words)


def directives(request: QuantizeRequest) -> list[str]:
    """Return the words of the `#SBATCH` lines: one node, as many GPUs as were asked for, and memory for all weights.

    The weights are in memory as they are loaded, and once more as a quantised copy.
    """
    slurm, memory_bytes = request.slurm, 1.6 * request.weight_bytes + _JOB_BASE_BYTES
    mem, name = f"{-(-int(memory_bytes) // GIB)}G", f"hpc-serve-quantize-{request.scheme}"
    sized = replace(slurm, cpus_per_task=slurm.cpus_per_task or _CPUS, mem=slurm.mem or mem, signal=None)
    return program_directives(sized, job_name=slurm.job_name or name, log_dir=request.log_dir, gpus=request.gpus)


def render_quantize_script(request: QuantizeRequest) -> str:
    """Return the script of the job, for `sbatch`, or (cluster "local") for bash. Raises InvalidRequestError."""
    return render_program(
        "quantize.sh.j2",
        title=f"Quantises {request.title} to {request.scheme} with llm-compressor.",
        directives=directives(request) if request.cluster == "slurm" else [],
        modules=request.modules,
        exports=request.env,
        templates_dir=request.templates_dir,
        venv=request.venv,
        words=program_words(request),
    )
