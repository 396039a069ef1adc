"""The frame of pages: that the browser may load nothing, and that no text of others becomes part of a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from hpc_serve.pages.frame import COLOURS, Curve, document, over_load, over_time, swatch, table

EVIL = "</script></style></title><!--<script>alert('1')</script>&amp;\u2028 \"'"


VOID = ("meta", "line", "rect", "circle", "polyline")


class Parts(HTMLParser):
    """The tags of a page, which are closed in order, their attributes, and the text of some elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {"title": [], "style": [], "script": [], "td": []}
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.texts:
            self.texts[self._open[-1]][-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop() == tag


def policy(text: str) -> str:
    return str(dict(Parts(text).attributes)["content"])


def test_style_and_script_are_those_of_the_policy() -> None:
    text = document("t", Markup("<p>x</p>"), style=".a{}", script="let a = 1 < 2;", data={"a": 1})
    parts, rules = Parts(text), policy(text)
    assert rules.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
    assert "unsafe" not in rules
    assert len(parts.texts["style"]) == 1
    for words in (parts.texts["style"][0], parts.texts["script"][1]):
        assert base64.b64encode(hashlib.sha256(words.encode()).digest()).decode() in rules
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert json.loads(parts.texts["script"][0]) == {"a": 1}


def test_a_page_without_a_script_may_have_none() -> None:
    text = document("t", Markup("<p>x</p>"))
    assert "script" not in policy(text) + text.split("<body>")[1]


def test_text_of_others_is_text() -> None:
    body = table([EVIL, "b"], [[EVIL, "1"]])
    text = document(EVIL, body, script="1;", data={"name": EVIL, EVIL: [EVIL]})
    parts = Parts(text)
    assert parts.tags.count("script") == 2
    assert parts.texts["title"] == [EVIL]
    assert parts.texts["td"] == [EVIL, "1"]
    assert json.loads(parts.texts["script"][0]) == {"name": EVIL, EVIL: [EVIL]}
    assert "alert('1')" not in text.split("<body>")[1].split('id="data">')[0]


@pytest.mark.parametrize("part", ["style", "script"])
def test_a_style_or_script_that_ends_its_element_is_refused(part: str) -> None:
    text = f"/* </{part.upper()}> */"
    with pytest.raises(AssertionError):
        document("t", Markup(""), style=text if part == "style" else "", script=text if part == "script" else "")


def test_every_series_has_a_colour_on_light_and_dark() -> None:
    text = document("t", swatch(COLOURS + 1))
    assert '<i class="swatch s1"></i>' in text
    for number in range(COLOURS):
        assert len(re.findall(rf"\.s{number}\{{color:#[0-9a-f]{{6}}\}}", text)) == 2


def test_axes_have_no_exponents() -> None:
    for most in (0.02, 7.0, 25_000.0, 3_000_000.0):
        points = [(float(at), most * at / 10) for at in range(11)]
        for picture in (
            over_time("x", [Curve(name="a", points=points)]),
            over_load("x", "load", [Curve(name="a", points=[(10**at, value) for at, value in points[1:8]])]),
        ):
            assert not re.search(r"\de[+-]?\d", picture)


def test_a_table_that_is_wider_than_the_screen_has_a_shadow_at_its_edge() -> None:
    page = document("x", table(["a"], [["1"]]))
    (rule,) = re.findall(r"\.scroll\{(.*?)\}", page, re.DOTALL)[:1]
    assert "overflow-x:auto" in rule
    assert rule.count("local") == 2  # these covers move with the table, and hide the shadow at its ends
