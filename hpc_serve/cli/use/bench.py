"""`bench`: measures a service in the figures of `vllm bench serve`, and shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hpc_serve.bench.run import Dataset, Lengths, Pace
from hpc_serve.cli.commands import FILE, SECONDS, GroupedCommand, Written, print_json
from hpc_serve.cli.complete import gpu_names, live_service_names
from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.given_files import parse_json

if TYPE_CHECKING:
    from hpc_serve.bench.run import Run
    from hpc_serve.bench.sweep import Sweep
    from hpc_serve.rendezvous.store import ServiceStore

_USUAL_LENGTHS = "1000/1000"
_USUAL_CONCURRENCY = (64,)


def _several(read_one: Callable[[str], Any], words: str, *, parted_by: str | None = ",") -> Written:
    """Return the kind of values that are parted by a sign. `read_one` raises ValueError for a word that is none."""

    def read(word: str) -> tuple[Any, ...]:
        try:
            return tuple(read_one(part) for part in word.split(parted_by))
        except ValueError:
            raise ValueError(f"{word}: write {words}.") from None

    return Written("several", read)


def _above_0(number: Any) -> Any:
    if not number > 0:
        raise ValueError(f"{number} is not above 0.")
    return number


def _lengths(text: str) -> Lengths:
    input_len, output_len = (_above_0(int(part)) for part in text.split("/"))
    return Lengths(input_len=input_len, output_len=output_len)


def _goal(text: str) -> tuple[str, float]:
    """Return a bound in milliseconds, as `vllm bench serve` takes it."""
    name, bound = text.split(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise ValueError
    return name, _above_0(float(bound))


_LENGTHS = _several(_lengths, "tokens in/tokens out, as 1800/128,128/1800")
_COUNTS = _several(lambda text: _above_0(int(text)), "numbers above 0, as 8 or 8,64")
_RATES = _several(lambda text: _above_0(float(text)), "numbers above 0, as 8 or 8,64")
_NUMBER = Written("number", lambda text: _above_0(float(text)))
_GOALS = _several(_goal, "ttft, tpot or e2el and milliseconds, as ttft:500", parted_by=None)
_GROUPS = {
    "Most used": (
        *("lengths", "max_concurrency", "num_prompts", "request_rate", "dataset_path", "wait", "html", "as_json"),
    ),
    "Requests": (
        *("dataset_name", "output_len", "prefix_len", "num_prefixes", "seed", "ignore_eos", "extra_body", "burstiness"),
        "split",
    ),
    "Figures": ("goals", "gpu", "check", "full", "save", "detailed", "plot"),
}
_DATASETS = get_args(Dataset)


@click.command("bench", cls=GroupedCommand, groups=_GROUPS)
@click.argument("services", nargs=-1, shell_complete=live_service_names)
@click.option("--dataset-name", type=click.Choice(_DATASETS), help="Kind of requests [random; with a file custom].")
@click.option("--dataset-path", type=FILE, help="A file of requests; custom: JSON lines with prompt or messages.")
@click.option(
    "--lengths",
    type=_LENGTHS,
    metavar="IN/OUT,…",
    help=f"Tokens of prompts and answers, as 1800/128 [{_USUAL_LENGTHS}].",
)
@click.option("--output-len", type=click.IntRange(1), help="With a file: tokens of each answer.")
@click.option("--num-prompts", type=click.IntRange(1), help="Requests of each run [1000; of a file all].")
@click.option("--max-concurrency", type=_COUNTS, metavar="N,…", help="Requests under way at once [64 without a rate].")
@click.option(
    "--request-rate", type=_RATES, metavar="R,…", help="Requests per second, sent without waiting for earlier answers."
)
@click.option("--burstiness", type=_NUMBER, metavar="B", default=1.0, help="Of a rate: 1 is Poisson, inf a clock [1].")
@click.option("--split", type=click.Choice(["client", "equally"]), default="client", help="Over replicas [client].")
@click.option("--prefix-len", type=click.IntRange(1), default=256, help="prefix_repetition: shared tokens [256].")
@click.option("--num-prefixes", type=click.IntRange(1), default=10, help="prefix_repetition: how many [10].")
@click.option("--seed", type=int, default=0, help="Of everything by chance [0].")
@click.option("--ignore-eos/--no-ignore-eos", default=None, help="Answers have the length asked for [not of a file].")
@click.option("--extra-body", metavar="JSON", help='More of each request, as {"temperature": 0}.')
@click.option(
    "--goodput", "goals", type=_GOALS, multiple=True, metavar="NAME:MS", help="Count requests within ttft, tpot, e2el."
)
@click.option("--wait", type=SECONDS, help="Wait for it that long if it is coming (600, 10m).")
@click.option(
    "--gpu",
    shell_complete=gpu_names,
    help="Predict for this accelerator, as `plan` takes it [what `submit` wrote down].",
)
@click.option("--check", metavar="FILE.py:FUNCTION", help="Count the answers that this function finds wrong.")
@click.option("--save", type=FILE, help="Write the figures as JSON, under vLLM's keys.")
@click.option("--detailed", is_flag=True, help="Write each request too (--save, --json).")
@click.option("--html", type=FILE, help="Write a page with tables and curves.")
@click.option("--plot", type=FILE, help="Draw throughput and latency: .png, .svg, .pdf.")
@click.option("--full", is_flag=True, help="Print all figures of each run, not one line.")
@click.option("--json", "as_json", is_flag=True, help="Print that JSON.")
def bench_command(services: tuple[str, ...], **options: Any) -> int:
    """Measure services: throughput and latency, as `vllm bench serve` measures them, over all their replicas.

    hpc-serve bench 405b --lengths 1000/1000 --max-concurrency 64,128

    hpc-serve bench 405b --dataset-path mine.jsonl --request-rate 1,2,4

    Several services, lengths, concurrencies or rates are one run each, and a table at the end. Ctrl-C ends the run and
    keeps what was measured; a second one drops it.
    """
    from hpc_serve.bench.expected import predict
    from hpc_serve.bench.page import page
    from hpc_serve.bench.plot import draw_runs
    from hpc_serve.bench.results import document, result_of
    from hpc_serve.bench.sweep import load_check, wrong_answers
    from hpc_serve.cli.use import bench_view
    from hpc_serve.plan.hardware import cluster_named
    from hpc_serve.plots.figure import check_picture
    from hpc_serve.rendezvous.store import own_store

    store = own_store()
    sweep = _sweep(services or (_only_service(store, options["wait"]),), options)
    check = load_check(options["check"]) if options["check"] is not None else None
    if options["gpu"] is not None:
        cluster_named(options["gpu"], total_bytes=1)
    if options["plot"] is not None:
        check_picture(options["plot"])
    for name in ("save", "html", "plot"):
        _check_output(options[name])
    runs, error = bench_view.measure(store, sweep)
    results = [
        result_of(
            run,
            goals_ms=dict(goal for goals in options["goals"] for goal in goals),
            predicted=predict(store, run, gpu=options["gpu"]),
            wrong=wrong_answers(run, check) if check is not None else None,
            is_detailed=options["detailed"],
        )
        for run in runs
    ]
    for number, run in enumerate(runs, start=1):
        _keep(store, run, number, options["gpu"])
    if results and options["as_json"]:
        print_json(document(results))
    elif results:
        bench_view.print_results(results, is_full=options["full"])
    if results and options["save"] is not None:
        _write(options["save"], json.dumps(document(results, options["save"]), ensure_ascii=False) + "\n")
    if results and options["html"] is not None:
        _write(options["html"], page(results))
    if results and options["plot"] is not None:
        draw_runs(results, options["plot"])
        click.echo(f"wrote {options['plot']}", err=True)
    if error is not None:
        raise error
    return 130 if any(run.interrupted for run in runs) else 0


def _keep(store: ServiceStore, run: Run, number: int, gpu: str | None) -> None:
    """Keep a run for later plans, and say so on stderr, or why it is not kept."""
    from hpc_serve.bench.expected import measured_run
    from hpc_serve.bench.service import one_line
    from hpc_serve.submit.plans.planning import FILE, keep_run

    try:
        kept = measured_run(store, run, gpu=gpu)
        keep_run(store.home, kept)
    except HpcServeError as error:
        click.echo(f"Run {number} is not kept for later plans: {one_line(error)}", err=True)
    else:
        ratio, where = kept.tokens_per_s / kept.printed_tokens_per_s, store.home / FILE
        click.echo(f"Run {number} is kept for later plans: × {ratio:.2g} of the printed speed ({where})", err=True)


def _sweep(services: tuple[str, ...], options: dict[str, Any]) -> Sweep:
    """Return the runs to make. Raises click.UsageError, InvalidRequestError."""
    from hpc_serve.bench.sweep import Sweep
    from hpc_serve.bench.workload import FORMATS, BenchWorkload

    path = options["dataset_path"]
    dataset: Dataset = options["dataset_name"] or ("random" if path is None else "custom")
    is_file = dataset in FORMATS
    if is_file and path is None:
        raise click.UsageError(f"--dataset-name {dataset} needs --dataset-path.")
    if path is not None and not is_file:
        raise click.UsageError(f"{dataset} is made and has no --dataset-path.")
    if is_file and options["lengths"] is not None:
        why = "A file has its own prompts: --output-len is the length of their answers, --lengths is not."
        raise click.UsageError(why)
    if options["output_len"] is not None and not is_file:
        raise click.UsageError("--output-len is for files; --lengths IN/OUT has both lengths.")
    rates, most = options["request_rate"], options["max_concurrency"]
    return Sweep(
        services=services,
        workloads=tuple(
            BenchWorkload(
                dataset=dataset,
                count=options["num_prompts"] or (None if is_file else 1000),
                path=path,
                lengths=lengths,
                ignore_eos=not is_file if options["ignore_eos"] is None else options["ignore_eos"],
                extra_body=_object(options["extra_body"]),
                **{name: options[name] for name in ("seed", "output_len", "prefix_len", "num_prefixes")},
            )
            for lengths in ((None,) if is_file else options["lengths"] or _LENGTHS.read(_USUAL_LENGTHS))
        ),
        paces=tuple(
            Pace(max_concurrency=at_once, request_rate=rate, burstiness=options["burstiness"])
            for rate in rates or (float("inf"),)
            for at_once in most or ((None,) if rates else _USUAL_CONCURRENCY)
        ),
        split=options["split"],
        wait=options["wait"],
    )


def _only_service(store: Any, wait: float | None) -> str:
    from hpc_serve.client.access import pick_service
    from hpc_serve.client.discovery.discovery import find_ready_services

    return pick_service(find_ready_services(store), store, waits=bool(wait))


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = parse_json(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.UsageError(f"--extra-body {text} is no JSON object.")
    return value


def _check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written before a run takes its minutes."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InvalidRequestError(f"{path} cannot be written: {path.parent} is no folder. Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequestError(f"{path} cannot be written: you may not write there. Choose another folder.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from error
    click.echo(f"wrote {path}", err=True)
