"""Turns published measurements into rows of data/speed_cases_later.jsonl.

    python -m benchmarks.accuracy.read_rows FORMAT REPOSITORY PATH... [--name OWNER/NAME] [--set FIELD=VALUE...]

REPOSITORY is a git directory, PATHs are files or folders of its newest commit, FORMAT is one of row_formats.py. Rows go
to the standard output; each one that is left out is told with its reason on the standard error. `--set` says what the
files do not, but their commands, scripts or dates do: the row names these fields.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.row_formats import FORMATS, Page, Row
from benchmarks.accuracy.speed_case import SHORTEST_OUTPUT, model_spec
from hpc_serve.errors import HpcServeError

ACCELERATORS = {
    "GB300": "gb300-288gb",
    "GB200": "gb200-186gb",
    "B300": "b300-288gb",
    "B200": "b200-180gb",
    "H200": "h200-141gb",
    "H100": "h100-80gb",
    "H20-3e": "h20-96gb",
    "A100-SXM4-40GB": "a100-40gb",
    "A100": "a100-80gb",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
    "L40S": "l40s",
    "NVIDIA L4": "l4",
    "T4": "t4",
    "RTX 3090": "rtx-3090",
    "RTX 5090": "rtx-5090",
    "TPU7x": "v7x",
    "v6e": "v6e",
    "v5e": "v5e",
}
"""Parts of a source's names of accelerators, the first that fits."""
OTHER_MEMORY = ("H20-3e",)
"""Accelerators whose memory is not the catalogue's: the row keeps `memory_gb`."""
ARRIVAL_SHARE = 0.2
"""Of a run's seconds: where requests arrive for longer, their rate bounds the tokens/s, and fewer are in flight."""
FOLDERS = {"docs", "performance-lab", "results", "verified", "performance", "run_1", "mlperf_log_summary", "result"}
FOLDERS |= {"experimental", "token_position_decode_slo", "inference", "readme", "vllm", "models"}
"""Parts of a path that say nothing of the run."""
KEPT = (
    *("id", "source", "date", "engine", "engine_version", "model", "quantization", "gpu", "accelerator", "memory_gb"),
    *("n_gpus", "tp", "pp", "replicas", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "async_scheduling", "enforce_eager", "scenario", "isl", "osl", "concurrency"),
    *("num_prompts", "lengths_vary", "longest_osl", "out_tok_s", "req_s", "ttft_ms_mean", "tpot_ms_mean", "elapsed_s"),
    *("command", "confidence"),
)
MEASURED = ("id", "out_tok_s", "req_s", "ttft_ms_mean", "tpot_ms_mean", "elapsed_s", "command")
"""Fields that tell no case from another."""


def finished(row: Row) -> Row:
    """Return a row with the catalogue's accelerator, the layout's GPUs and the format of a checkpoint's name."""
    row = {name: value for name, value in row.items() if value not in (None, False)}
    names = [part for part in ACCELERATORS if part.lower() in row.get("gpu", "").lower()]
    if names:
        row["accelerator"] = ACCELERATORS[names[0]]
    if not names or names[0] not in OTHER_MEMORY:
        row.pop("memory_gb", None)
    if row.get("node_gpus", 1) == 1 and "number" in row:
        row.setdefault("tp", 1)
    if "tp" in row:
        row["n_gpus"] = row["tp"] * row.get("pp", 1) * row.get("replicas", 1)
    model = row.get("model", "")
    if model.endswith("-FP8") and not known(model) and known(model.removesuffix("-FP8")):
        row |= {"model": model.removesuffix("-FP8"), "quantization": "fp8"}
    return row


def known(model: str) -> bool:
    """Tell whether the catalogue or speed_case.CONFIGS has a model."""
    try:
        model_spec(model, None)
    except HpcServeError:
        return False
    return True


def why_left_out(row: Row) -> str | None:
    """Return all reasons why a row is not compared; None if it can be."""
    rate, seconds = row.get("request_rate"), row.get("elapsed_s")
    reasons = {
        "no tokens/s": not row.get("out_tok_s"),
        "no lengths of prompts and answers": not (row.get("isl") and row.get("osl")),
        "no number of requests at once": not row.get("concurrency"),
        "no version of the engine": not row.get("engine_version"),
        "no layout": not row.get("tp"),
        f"the catalogue does not have {row.get('gpu') or 'the accelerator, which is not said'}": "accelerator"
        not in row,
        f"the catalogue does not have {row.get('model')}": not known(row.get("model", "")),
        "requests failed": bool(row.get("failed")),
        "speculative decoding": bool(row.get("speculative")),
        "prefill and decode apart": bool(row.get("disaggregated")),
        "data or expert parallelism": row.get("dp", 1) > 1 or row.get("ep", 1) > 1 or _of_experts(row),
        "answers of fewer tokens than are compared": row.get("osl", SHORTEST_OUTPUT) < SHORTEST_OUTPUT,
        "requests arrive over much of the run": bool(
            rate and seconds and row["num_prompts"] / rate > ARRIVAL_SHARE * seconds
        ),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


def _of_experts(row: Row) -> bool:
    return bool(row.get("expert_parallel") or row.get("dp_attention"))


def rows_of(format_name: str, page: Page, about: Row, given: Row) -> Iterator[tuple[Row, str | None]]:
    """Yield each row of a file, and why it is left out. Of runs that the plan cannot tell apart the first counts."""
    seen = set()
    for found in FORMATS[format_name](page):
        row = finished({"of": page.path, **about, **found, **given})
        row["source"] = f"{about['repository']} {row['of']}@{about['commit']}"
        parts = [one for one in page.path.lower().rsplit(".", 1)[0].split("/") if one not in FOLDERS]
        row["id"] = "-".join([about["repository"].split("/")[-1].lower(), *parts])
        row["id"] += f"-{row['number']:02}" if "number" in row else ""
        row["confidence"] = "read by read_rows.py" + (f"; said by hand: {', '.join(sorted(given))}" if given else "")
        kept = {name: row[name] for name in KEPT if name in row}
        case = json.dumps({name: value for name, value in kept.items() if name not in MEASURED})
        reason = why_left_out(row) or ("the same case as a row before it" if case in seen else None)
        seen.add(case)
        yield kept, reason


def pages(repository: Path, paths: Sequence[str]) -> Iterator[Page]:
    """Yield the files of a repository's newest commit, those of folders too."""

    def names(folder: str) -> list[str]:
        return _git(repository, "ls-tree", "-r", "--name-only", "HEAD", "--", folder).splitlines()

    def show(path: str) -> str:
        return _git(repository, "show", f"HEAD:{path}") if path else ""

    for path in (one for given in paths for one in names(given)):
        yield Page(path=path, text=show(path), show=show, names=names)


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False).stdout


def value_of(text: str) -> tuple[str, Any]:
    """Return the field and the value of `FIELD=VALUE`, which is JSON or a word."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    """Print the rows, and tell what is left out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("repository", type=Path)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--name", required=True, help="owner/name of the repository")
    parser.add_argument("--set", nargs="*", default=[], type=value_of, metavar="FIELD=VALUE")
    asked = parser.parse_args()
    commit = _git(asked.repository, "rev-parse", "HEAD")[:8]
    for page in pages(asked.repository, asked.paths):
        about = {
            "repository": asked.name,
            "commit": commit,
            "date": _git(asked.repository, "log", "-1", "--format=%cs", "--", page.path).strip(),
        }
        for row, reason in rows_of(asked.format, page, about, dict(asked.set)):
            if reason:
                print(f"left out: {row['id']}: {reason}", file=sys.stderr)
            else:
                print(json.dumps(row))


if __name__ == "__main__":
    main()
