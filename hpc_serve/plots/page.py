"""A plan's speed as a page to try out: sliders for context and batch, layouts or accelerators side by side.

Every figure in it was computed by plan/speed/; its script (plan_page.js) only chooses and draws. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import hpc_serve
from hpc_serve.errors import InvalidRequestError
from hpc_serve.pages.frame import document, swatch, table
from hpc_serve.plan.report.classes import class_texts
from hpc_serve.plan.report.speed import accuracy_text, formula_text
from hpc_serve.plan.speed.decode import critical_batch
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.plan.speed.traffic import Speed, Traffic
from hpc_serve.plots.curves import Drawn, batches, drawn_of

if TYPE_CHECKING:
    from hpc_serve.plan.make import PlanResult

CONTEXTS = tuple(512 << power for power in range(9))
_MOST_SUBJECTS = 6
_PER_OCTAVE = 2
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One of those compared: a layout of one replica on an accelerator."""

    name: str
    drawn: Drawn


def write_page(results: Sequence[PlanResult], path: str) -> None:
    """Write the page of plans. Raises InvalidRequestError where it cannot, or where no accelerator's speed is known."""
    text = speed_page(results)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}.") from None


def speed_page(results: Sequence[PlanResult]) -> str:
    """Return the page: of one plan its layouts, of several their chosen ones."""
    planned = [result for result in results if result.plan is not None]
    found = _layouts(planned[0]) if len(planned) == 1 else [_chosen(result) for result in planned]
    first = planned[0]
    formulas = _formulas(first.traffic)
    kinds = dict.fromkeys(one.drawn.roofline.accelerator.kind for one in found)
    classes = list(dict.fromkeys(text for one in found for text in class_texts(one.drawn.roofline)))
    contexts = found[0].drawn.contexts(CONTEXTS, most=len(CONTEXTS) + 1)
    shortest = min(one.drawn.max_model_len for one in found) - first.traffic.output_tokens
    contexts = [length for length in contexts if length <= shortest]
    data = {
        "outputs": first.traffic.output_tokens,
        "unit": _unit(found),
        "usd": first.usd_per_gpu_hour,
        "contexts": contexts,
        "context": contexts.index(first.traffic.input_tokens),
        "batch": first.traffic.concurrency,
        "ideal": first.ideal,
        "formula": _key(first.traffic),
        "formulas": [
            {
                "key": _key(traffic),
                "says": formula_text(traffic),
                "accuracy": "; ".join(
                    [accuracy_text(traffic, kind) for kind in kinds] + ([] if traffic.decode_only else classes)
                ),
            }
            for traffic in formulas
        ],
        "subjects": [_subject(one, formulas, contexts) for one in found],
    }
    body = Markup("\n").join(_body(first, found, formulas, contexts))
    script = (_HERE / "plan_page.js").read_text(encoding="utf-8")
    style = (_HERE / "plan_page.css").read_text(encoding="utf-8")
    return document(f"{first.model.name}: speed", body, style=style, script=script, data=data)


def _layouts(result: PlanResult) -> list[Subject]:
    """Return the chosen layout and others of the plan that fit."""
    fitting = [one for one in result.chosen.candidates if one.verdict in ("chosen", "fits") and one.memory]
    fitting.sort(key=lambda one: one.verdict != "chosen")
    return [
        Subject(name=f"{one.layout}", drawn=drawn_of(result, one.layout, one.memory))
        for one in fitting[:_MOST_SUBJECTS]
        if one.memory
    ]


def _chosen(result: PlanResult) -> Subject:
    plan = result.chosen
    return Subject(name=f"{plan.accelerator.name}, {plan.layout}", drawn=drawn_of(result, plan.layout, plan.memory))


def _unit(found: Sequence[Subject]) -> str:
    units = {one.drawn.roofline.accelerator.unit for one in found}
    return units.pop() if len(units) == 1 else "device"


def _formulas(asked: Traffic) -> list[Traffic]:
    """Return the traffic of each formula; bursts with the longest answer that was asked for."""
    plain = replace(asked, arrivals="steady", longest_output_tokens=None, decode_only=False)
    burst = asked if asked.arrivals == "burst" else replace(plain, arrivals="burst")
    return [plain, burst, replace(plain, decode_only=True)]


def _key(traffic: Traffic) -> str:
    return "decode" if traffic.decode_only else traffic.arrivals


def _subject(one: Subject, formulas: Sequence[Traffic], contexts: Sequence[int]) -> dict[str, Any]:
    roofline = one.drawn.roofline
    return {
        "name": one.name,
        "gpus": roofline.layout.num_gpus,
        "critical": critical_batch(roofline),
        "curves": {
            _key(traffic): [_curve(replace(one.drawn, traffic=traffic), length) for length in contexts]
            for traffic in formulas
        },
    }


def _curve(drawn: Drawn, input_tokens: int) -> dict[str, Any]:
    """Return requests at once, and columns of figures of both kinds."""
    sizes = batches(drawn.held(input_tokens), _PER_OCTAVE)
    along = [drawn.at(input_tokens, size) for size in sizes]
    return {
        "batch": sizes,
        "expected": _columns(along, [one.expected for one in along]),
        "ideal": _columns(along, [one.ideal for one in along]),
    }


def _columns(along: Sequence[SpeedEstimate], speeds: Sequence[Speed]) -> dict[str, list[Any]]:
    return {
        "tpot": [_short(1000 * speed.tpot_s) for speed in speeds],
        "ttft": [_short(1000 * speed.ttft_s) for speed in speeds],
        "rate": [_short(speed.output_tokens_per_s / one.num_gpus) for one, speed in zip(along, speeds)],
        "bound": [speed.bound for speed in speeds],
    }


def _short(value: float) -> float:
    """Round to four digits.

    >>> _short(12345.6), _short(0.012345)
    (12350.0, 0.01234)
    """
    return round(value, 3 - int(log10(value) // 1)) if value > 0 else 0.0


def _body(
    first: PlanResult, found: Sequence[Subject], formulas: Sequence[Traffic], contexts: Sequence[int]
) -> list[Markup]:
    drawn = found[0].drawn
    about = (
        f"One replica; answers of {first.traffic.output_tokens:,} tokens. hpc-serve {hpc_serve.__version__}. "
        "Ideal: every rate at its peak, communication hidden; no published measurement is above it."
    )
    names = {"steady": "steady arrivals", "burst": "all at once", "decode": "decoding alone"}
    formula = Markup("").join(
        Markup('<label><input type="radio" name="formula" value="{}"> {}</label>').format(key, names[key])
        for key in map(_key, formulas)
    )
    layouts = Markup("").join(
        Markup('<label><input type="checkbox" name="subject" value="{}" checked> {} {}</label>').format(
            place, swatch(place), one.name
        )
        for place, one in enumerate(found)
    )
    figures = Markup("").join(
        Markup('<label><input type="checkbox" name="kind" value="{}"> {}</label>').format(kind, words)
        for kind, words in (("expected", "expected (solid)"), ("ideal", "ideal (dashed)"))
    )
    charts = Markup("").join(
        Markup(
            '<figure><figcaption id="{0}-title"></figcaption>'
            '<svg id="{0}" role="img" aria-labelledby="{0}-title"></svg></figure>'
        ).format(name)
        for name in ("rate", "time", "both")
    )
    return [
        Markup("<h1>{}</h1>\n<p class='about'>{}</p>").format(first.model.name, about),
        Markup("<noscript><p class='note'>{}</p>{}</noscript>").format(
            "This page shows only the figures of your options while its script does not run.",
            _still_table(drawn, first.traffic.input_tokens),
        ),
        Markup(
            '<div id="tool" hidden><div class="controls"><fieldset><legend>Formula</legend>{}</fieldset>'
            "<fieldset><legend>Figures</legend>{}</fieldset><fieldset><legend>Compared</legend>{}</fieldset></div>\n"
            '<div class="sliders"><label>Tokens of a prompt <input type="range" id="context" min="0" max="{}" step="1">'
            '<output id="context-says"></output></label>'
            '<label>Requests at once <input type="range" id="batch" min="0" max="1" step="1">'
            '<output id="batch-says"></output></label></div>\n'
            '<p id="says" aria-live="polite"></p><div class="charts">{}</div>'
            '<div class="scroll"><table id="values"></table></div><div id="tip" hidden></div></div>'
        ).format(formula, figures, layouts, len(contexts) - 1, charts),
    ]


def _still_table(drawn: Drawn, input_tokens: int) -> Markup:
    rows = [
        (
            f"{size:,}",
            f"{1000 * one.expected.tpot_s:,.1f}",
            f"{one.expected.output_tokens_per_s:,.0f}",
            f"{one.ideal.output_tokens_per_s:,.0f}",
        )
        for size in batches(drawn.held(input_tokens), 1)
        for one in [drawn.at(input_tokens, size)]
    ]
    return table(("at once", "ms between tokens", "tokens/s", "ideal"), rows)
