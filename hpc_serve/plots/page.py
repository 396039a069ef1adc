"""A plan's speed as a page to try out: sliders for context and batch, layouts or accelerators side by side.

Every figure in it was computed by plan/speed/; its script (plan_page.js) only chooses and draws. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import hpc_serve
from hpc_serve.errors import InvalidRequestError
from hpc_serve.pages.frame import document
from hpc_serve.plan.report.speed import accuracy_text, formula_text
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, class_texts
from hpc_serve.plan.speed.throughput import Traffic, critical_batch
from hpc_serve.plots.curves import curve, drawn_speeds, prompt_lengths, with_prompts

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult

_PROMPTS = tuple(512 << power for power in range(9))
_MOST_COMPARED = 6
_PER_OCTAVE = 2
_FORMULAS = {"steady": "steady arrivals", "burst": "all at once", "decode": "decoding alone"}
_HERE = Path(__file__).parent


def write_page(results: Sequence[PlanResult], path: str) -> None:
    """Write the page of plans. Raises InvalidRequestError where it cannot, or where no accelerator's speed is known."""
    text = _speed_page(results)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}.") from None


def _speed_page(results: Sequence[PlanResult]) -> str:
    """Return the page: of one plan its layouts, of several their chosen ones."""
    planned = [result for result in results if result.plan is not None]
    first, compared = planned[0], _compared(planned)
    drawn = list(compared.values())
    asked = first.traffic
    formulas = _formulas(asked)
    longest = min(one.chosen.max_model_len for one in planned)
    contexts = prompt_lengths(longest, asked, _PROMPTS, len(_PROMPTS) + 1)
    units = {one.roofline.accelerator.unit for one in drawn}
    data = {
        "unit": units.pop() if len(units) == 1 else "device",
        "usd": first.asked.usd_per_gpu_hour,
        "contexts": contexts,
        "context": contexts.index(asked.input_tokens),
        "batch": asked.concurrency,
        "ideal": first.asked.ideal,
        "formula": _key(asked),
        "formulas": [
            {"key": key, "name": _FORMULAS[key], "says": formula_text(traffic), "accuracy": _accuracy(traffic, drawn)}
            for key, traffic in formulas.items()
        ],
        "subjects": [_subject(name, one, formulas, contexts) for name, one in compared.items()],
    }
    about = (
        f"One replica; answers of {asked.output_tokens:,} tokens. hpc-serve {hpc_serve.__version__}. "
        "Ideal: every rate at its peak, communication hidden; no published measurement is above it."
    )
    body, style, script = ((_HERE / f"plan_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    heading = Markup('<h1>{}</h1>\n<p class="about">{}</p>\n').format(first.model.name, about)
    return document(f"{first.model.name}: speed", heading + Markup(body), style=style, script=script, data=data)


def _compared(planned: Sequence[PlanResult]) -> dict[str, ReplicaSpeeds]:
    """Return what is compared, by name: of one plan the chosen layout and others that fit, else the chosen layouts."""
    if len(planned) > 1:
        return {f"{one.accelerator.name}, {one.chosen.layout}": drawn_speeds(one) for one in planned}
    fitting = [one for one in planned[0].chosen.candidates if one.memory and one.verdict in ("chosen", "fits")]
    fitting.sort(key=lambda one: one.verdict != "chosen")
    return {str(one.layout): drawn_speeds(planned[0], one) for one in fitting[:_MOST_COMPARED]}


def _formulas(asked: Traffic) -> dict[str, Traffic]:
    """Return the traffic of each formula; bursts with the longest answer that was asked for."""
    plain = replace(asked, arrivals="steady", longest_output_tokens=None, decode_only=False)
    burst = asked if asked.arrivals == "burst" else replace(plain, arrivals="burst")
    return {_key(traffic): traffic for traffic in (plain, burst, replace(plain, decode_only=True))}


def _key(traffic: Traffic) -> str:
    return "decode" if traffic.decode_only else traffic.arrivals


def _accuracy(traffic: Traffic, drawn: Sequence[ReplicaSpeeds]) -> str:
    """Return how far published figures were from this formula's: by kind of accelerator, then by class of run."""
    kinds = dict.fromkeys(one.roofline.accelerator.kind for one in drawn)
    classes = dict.fromkeys(text for one in drawn for text in class_texts(one.roofline))
    runs = max(len(one.roofline.measured.runs) if one.roofline.measured else 0 for one in drawn)
    here = [f"{runs} runs that were measured here correct the figures near them"] if runs else []
    return "; ".join(
        [*here, *(accuracy_text(traffic, kind) for kind in kinds), *(() if traffic.decode_only else classes)]
    )


def _subject(name: str, drawn: ReplicaSpeeds, formulas: dict[str, Traffic], contexts: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "gpus": drawn.roofline.layout.num_gpus,
        "critical": critical_batch(drawn.roofline),
        "curves": {
            key: [_curve(with_prompts(replace(drawn, traffic=traffic), length)) for length in contexts]
            for key, traffic in formulas.items()
        },
    }


def _curve(speeds: ReplicaSpeeds) -> dict[str, Any]:
    """Return requests at once, and columns of figures of both kinds, in four digits."""
    along = curve(speeds, _PER_OCTAVE)
    columns: dict[str, Any] = {"batch": [one.traffic.concurrency for one in along]}
    for kind in ("expected", "ideal"):
        speeds_of_kind = [(getattr(one, kind), one.num_gpus) for one in along]
        columns[kind] = {
            "tpot": [float(f"{1000 * speed.tpot_s:.4g}") for speed, _ in speeds_of_kind],
            "ttft": [float(f"{1000 * speed.ttft_s:.4g}") for speed, _ in speeds_of_kind],
            "rate": [float(f"{speed.output_tokens_per_s / gpus:.4g}") for speed, gpus in speeds_of_kind],
            "bound": [speed.bound for speed, _ in speeds_of_kind],
        }
    return columns
