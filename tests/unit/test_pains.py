"""What `tests.pains` makes of what it sees: a pain that breaks is never right, and the page says so."""

from __future__ import annotations

import dataclasses
from unittest.mock import MagicMock

import pytest

from tests.pains import __main__ as pains
from tests.pains.pain import PAINS, Seen
from tests.pains.table import NOT_HERE, Surroundings, results_page, summary


def seen(said: str, **changes) -> Seen:
    return dataclasses.replace(Seen(said=said, by="a rule", is_before_weights=True, seconds=1.0), **changes)


def test_each_of_the_25_has_a_pain_or_a_reason():
    assert {one.number for one in PAINS.values()} | set(NOT_HERE) >= set(range(1, 26))


@pytest.mark.parametrize("name", PAINS)
def test_a_pain_that_broke_is_not_right_whatever_its_words(name):
    broken = seen(f"waited 300 s for the end of {name.replace('_', '-')}: {PAINS[name].title}", is_measured=False)
    assert not PAINS[name].is_right(broken)
    assert f"not measured: {name}" in summary([(PAINS[name], broken)])


def test_a_pain_that_breaks_says_why_and_ends_no_other(capsys):
    site = MagicMock()
    site.cluster.what_is_unwell.return_value = ""
    site.evidence.return_value = "squeue: (nothing)"
    pain = dataclasses.replace(PAINS["long_path"], provoke=MagicMock(side_effect=TimeoutError("waited 300 s")))
    found = pains._provoke(site, pain, 0)  # 0: no deadline
    assert (found.is_measured, "waited 300 s" in found.said, site.clear.call_count) == (False, True, 1)
    assert "squeue: (nothing)" in capsys.readouterr().err


def test_the_page_has_a_line_for_each():
    outcomes = [
        (PAINS["long_path"], seen("the path is too long")),
        (PAINS["no_ray"], seen("something else")),
        (PAINS["idle_nodes"], seen("not over after 240 s", is_measured=False)),
    ]
    page = results_page(outcomes, Surroundings.now(), Surroundings.now())
    assert all(pain.name in page for pain, _ in outcomes)
    assert "2 of 25 brought about" in page
    assert "before a weight was read: 1; wrong: no_ray; not measured: idle_nodes" in page
