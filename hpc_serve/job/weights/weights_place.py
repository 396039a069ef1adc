"""Finds a run's weights: their filesystem, their size, and the memory that is free for them. It also finds the loading
strategies of the engine's version. `vllm/load_strategy.py` decides what follows.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_serve.hub.local_weights import cached_folder, weight_files
from hpc_serve.job.machine.node_memory import available_memory
from hpc_serve.vllm.arguments import names_in
from hpc_serve.vllm.command import ServeCommand
from hpc_serve.vllm.load_strategy import WeightsPlace, choose_strategy

_log = logging.getLogger(__name__)
_ELSEWHERE = frozenset({"--download-dir", "--revision"})
_STRATEGIES = re.compile(r"SafetensorsLoadStrategy\b[^=\n]*=\s*Literal\[([^\]]*)\]")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # as /proc/mounts writes blanks


def with_strategy(command: ServeCommand, environ: Mapping[str, str], *, num_nodes: int) -> tuple[ServeCommand, str]:
    """Return the command by which the engine reads its weights fast on this node, and why; the log says so too."""
    try:
        place = find_weights(command.weights, command.options, environ)
    except (OSError, ValueError) as error:
        _log.warning("where the weights are cannot be seen, so vLLM chooses how it loads them: %s", error)
        return command, f"vLLM's default: where the weights are cannot be seen: {error}"
    if place is None:
        return command, ""
    ranks = -(-command.world_size // num_nodes)
    chosen = choose_strategy(command.options, place, known=known_strategies(), ranks_per_node=ranks)
    _log.info("loading weights: %s", chosen.reason)
    return replace(command, argv=(*command.argv, *chosen.args)), chosen.reason


def find_weights(model: str, words: tuple[str, ...], environ: Mapping[str, str]) -> WeightsPlace | None:
    """Return the place of a model's safetensors files; None if there are none to be seen. Raises OSError,
    ValueError."""
    folder = Path(model) if model.startswith("/") else cached_folder(model, environ)
    if folder is None or _ELSEWHERE & names_in(words):
        return None
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    if not files:
        return None
    sizes = [path.stat().st_size for path in files]
    return WeightsPlace(
        filesystem=filesystem_of(files[0]),
        total_bytes=sum(sizes),
        largest_bytes=max(sizes),
        available_bytes=available_memory(),
    )


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of filesystem that a file lies on, links followed, as the kernel names it. Raises OSError."""
    real, found = os.path.realpath(path), ("", "unknown")
    for line in mounts.read_text(errors="replace").splitlines():
        _, mounted_at, kind, *_ = line.split()
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), mounted_at)
        # If there are several mounts at one point, the last one is seen.
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def is_in_memory(folder: Path) -> bool:
    """Return whether what lies in a folder takes memory."""
    return filesystem_of(folder) in ("tmpfs", "ramfs")


def known_strategies() -> tuple[str, ...]:
    """The strategies that the engine of this environment has, as its source lists them; none where there is no vLLM."""
    spec = importlib.util.find_spec("vllm")  # imports nothing of it
    if spec is None or not spec.submodule_search_locations:
        return ()
    try:
        text = (Path(spec.submodule_search_locations[0]) / "config" / "load.py").read_text(errors="replace")
    except OSError:
        return ()
    listed = _STRATEGIES.search(text)
    return tuple(re.findall(r"\"(\w+)\"", listed[1])) if listed else ()
