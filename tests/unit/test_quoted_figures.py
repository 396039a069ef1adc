"""Each figure that a document quotes from a benchmark or the tables of faults is the one in its file."""

from __future__ import annotations

import pytest

from tests.support.quoted_figures import DOCUMENTS, QUOTED, ROOT, figure, renewed, unheld

PLACE = "gateway_rate / streams, 16 in flight / gateway / requests/s"
WHAT_WAS_RUN = (ROOT / "docs" / "evidence" / "what-was-run.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_quoted_figures_are_those_of_their_files(document) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert QUOTED.findall(renewed(text)) == QUOTED.findall(text), "`python -m tests.support.quoted_figures` renews them"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_figure_of_a_benchmark_is_quoted_without_its_place(document) -> None:
    assert unheld((ROOT / document).read_text(encoding="utf-8")) == []


def test_figures_are_quoted_at_all() -> None:
    assert len(QUOTED.findall(WHAT_WAS_RUN)) > 20


def test_a_figure_is_renewed_to_as_many_digits() -> None:
    rate = figure(PLACE)
    assert (
        renewed(f"7<!--{PLACE}--> and 7,000.5<!--{PLACE}-->")
        == f"{rate:.0f}<!--{PLACE}--> and {rate:,.1f}<!--{PLACE}-->"
    )


def test_a_place_that_is_in_no_file_is_an_error() -> None:
    with pytest.raises(KeyError):
        figure("gateway_rate / no such case / gateway / requests/s")
    with pytest.raises(KeyError):
        figure("faults / no-such-fault / gap s")


@pytest.mark.parametrize(
    "text",
    [
        "| requests (`python -m benchmarks.gateway_rate`) | 0.89 times |",
        "Measured by `make faults`: it was left within 10 s.",
        "[The table](tests/faults/RESULTS.md): 2,300 requests/s.",
    ],
)
def test_a_figure_without_a_place_is_found(text) -> None:
    assert len(unheld(text)) == 1
    assert unheld("A start takes 5 s.\n\n" + text.partition(":")[0].partition("|")[0]) == []
