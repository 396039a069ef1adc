"""The GPUs of a node: as the driver's tool lists them, and as a process of this job sees them (`cuda_probe`).

A GPU that another program has just left may show its memory in use for a moment. The GPU is then looked at again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpc_serve.errors import RecordError
from hpc_serve.job.preflight.facts import CudaFacts, GpuFacts, GpusFacts, Needs
from hpc_serve.job.preflight.gather.software import torch_cuda
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.sizes import MIB

Row = dict[str, str]
"""A GPU as a tool lists it: texts by the names of nvidia-smi's fields."""
_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version", "ecc.errors.uncorrected.volatile.total")
_NVIDIA = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_ROCM = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
_TOOL_S, _PROBE_S = 30.0, 60.0
_FREED_WITHIN_S, _LOOK_AGAIN_S = 30.0, 2.0
_BUSY = ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_OUT_OF_MEMORY")
_LONGEST = 300


def gather_gpus(needs: Needs, environ: Mapping[str, str]) -> GpusFacts | None:
    """Return the GPUs of this node; None if the engine needs none. Raises OSError."""
    if not needs.gpus:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi", path=environ.get("PATH")):
        facts = _listed(_NVIDIA, parse_nvidia, visible, environ)
    elif shutil.which("rocm-smi", path=environ.get("PATH")):
        visible = environ.get("HIP_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES")
        return _listed(_ROCM, parse_rocm, visible, environ)
    else:
        facts = GpusFacts(tool="", visible=visible)
    if facts.tool or torch_cuda():
        return replace(facts, cuda=_probe_until_free(needs, environ))
    return facts


def _listed(
    argv: Sequence[str], parse: Callable[[str], list[Row]], visible: str | None, environ: Mapping[str, str]
) -> GpusFacts:
    """Return the GPUs that a driver's tool lists, or what it says in place of a list."""
    done = _run(argv, environ, _TOOL_S)
    if done.returncode:
        return GpusFacts(tool=argv[0], visible=visible, error=_last_line(done.stdout + done.stderr))
    listed = parse(done.stdout)
    chosen = choose_visible(listed, visible)
    gpus = None if chosen is None else tuple(map(read_gpu, chosen))
    return GpusFacts(tool=argv[0], driver=listed[0]["driver_version"] if listed else "", visible=visible, gpus=gpus)


def parse_nvidia(text: str) -> list[Row]:
    """Return the rows of nvidia-smi, one for each GPU."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row)) for row in rows if len(row) == len(_FIELDS)]


def parse_rocm(text: str) -> list[Row]:
    """Return the rows of `rocm-smi --json`, an object of cards. The keys of a card differ by version."""
    try:
        cards = json.loads(text[text.index("{") :])
    except ValueError:
        return []
    found: list[Row] = []
    for name, card in sorted(cards.items()):
        if name.startswith("card") and isinstance(card, dict):
            values = {key.lower(): str(value) for key, value in card.items()}
            series = next((value for key, value in values.items() if key in ("card series", "card model")), "AMD GPU")
            total = str(_number(values.get("vram total memory (b)", "")) // MIB)
            found.append(dict(zip(_FIELDS, (str(len(found)), "", series, total, "", ""))))
    return found


def choose_visible(listed: Sequence[Row], visible: str | None) -> list[Row] | None:
    """Return the GPUs that are visible, by number or UUID; None if they are parts of GPUs, or the tool says no UUID."""
    if visible is None:
        return list(listed)
    found = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        if word.startswith("MIG-") or not (word.isdigit() or any(gpu["uuid"] for gpu in listed)):
            return None
        found += [gpu for gpu in listed if gpu["index"] == word or (len(word) > 4 and gpu["uuid"].startswith(word))]
    return found


def read_gpu(row: Row) -> GpuFacts:
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
    return any(
        device.error.startswith(_BUSY) or device.free_bytes < needs.asked_bytes(device.total_bytes)
        for device in facts.devices[: needs.gpus]
    )


def _probe(environ: Mapping[str, str]) -> CudaFacts | None:
    argv = (sys.executable, "-m", "hpc_serve.job.preflight.gather.cuda_probe")
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


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended with an error"])[-1][:_LONGEST]
