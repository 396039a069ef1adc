"""Gathers a node's facts about its GPUs; `gather_node` gathers all others.

The driver's tool lists the GPUs, and a process of this job tries them (`cuda_probe`). A GPU that another program has
just left may show its memory in use for a moment. The GPU is then looked at again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpc_serve.errors import RecordError
from hpc_serve.job.preflight.facts import CudaFacts, GpuFacts, GpusFacts, Needs
from hpc_serve.job.preflight.gather_node import torch_cuda
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.units import MIB

_Row = dict[str, str]
"""A GPU as the tool lists it: texts by the names of nvidia-smi's fields."""
_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version", "ecc.errors.uncorrected.volatile.total")
_TOOL = "nvidia-smi"
_LISTING = (_TOOL, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_TOOL_S, _PROBE_S = 30.0, 60.0
_FREED_WITHIN_S, _LOOK_AGAIN_S = 30.0, 2.0
_BUSY = ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_OUT_OF_MEMORY")
_LONGEST = 300


def gather_gpus(needs: Needs, environ: Mapping[str, str]) -> GpusFacts | None:
    """Return the GPUs of this node; None if the engine needs none. Raises OSError."""
    if not needs.gpus:
        return None
    facts = GpusFacts(tool="", visible=environ.get("CUDA_VISIBLE_DEVICES"))
    if shutil.which(_TOOL, path=environ.get("PATH")):
        facts = _listed(facts.visible, environ)
    if facts.tool or torch_cuda():
        return replace(facts, cuda=_probe_until_free(needs, environ))
    return facts


def _listed(visible: str | None, environ: Mapping[str, str]) -> GpusFacts:
    """Return the GPUs that the driver's tool lists, or what it says in place of a list."""
    done = _run(_LISTING, environ, _TOOL_S)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        error = lines[-1][:_LONGEST] if lines else "it ended with an error"
        return GpusFacts(tool=_TOOL, visible=visible, error=error)
    listed = parse_listing(done.stdout)
    chosen = choose_visible(listed, visible)
    gpus = None if chosen is None else tuple(map(read_gpu, chosen))
    return GpusFacts(tool=_TOOL, driver=listed[0]["driver_version"] if listed else "", visible=visible, gpus=gpus)


def parse_listing(text: str) -> list[_Row]:
    """Return the rows of nvidia-smi, one for each GPU."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row)) for row in rows if len(row) == len(_FIELDS)]


def choose_visible(listed: Sequence[_Row], visible: str | None) -> list[_Row] | None:
    """Return the GPUs that are visible, by number or UUID; None if they are parts of GPUs."""
    if visible is None:
        return list(listed)
    found = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        if word.startswith("MIG-"):
            return None
        found += [gpu for gpu in listed if gpu["index"] == word or (len(word) > 4 and gpu["uuid"].startswith(word))]
    return found


def read_gpu(row: _Row) -> GpuFacts:
    """Return the facts of a listed GPU. nvidia-smi prints "[N/A]" for a number that a GPU does not have."""
    return GpuFacts(
        name=row["name"],
        total_bytes=_number(row["memory.total"]) * MIB,
        uncorrected_errors=_number(row["ecc.errors.uncorrected.volatile.total"]),
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _probe_until_free(needs: Needs, environ: Mapping[str, str]) -> CudaFacts | None:
    """Try CUDA, and again while a GPU is in use that somebody may be leaving."""
    deadline = time.monotonic() + _FREED_WITHIN_S
    while True:
        facts = _probe(environ)
        if facts is None or not is_in_use(facts, needs) or time.monotonic() > deadline:
            return facts
        time.sleep(_LOOK_AGAIN_S)


def is_in_use(facts: CudaFacts, needs: Needs) -> bool:
    """Return whether a GPU of the engine's is in use by another program, so that it may be free later."""
    return any(device.error.startswith(_BUSY) or needs.is_full(device) for device in facts.devices[: needs.gpus])


def _probe(environ: Mapping[str, str]) -> CudaFacts | None:
    argv = (sys.executable, "-m", "hpc_serve.job.preflight.cuda_probe")
    try:
        done = _run(argv, environ, _PROBE_S)
        return from_json_text(CudaFacts, done.stdout, source="the probe of CUDA")
    except (RecordError, subprocess.TimeoutExpired):
        return None


def _run(argv: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        start_new_session=True,
        check=False,
    )
