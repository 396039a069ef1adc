"""Printed samples are what the commands print: here, or in the kept run on the cluster; the recording is whole."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from tests.samples import here, kept, pages
from tests.samples.recording import Screen, chosen, shortened, svg
from tests.samples.terminal import Span, Style, Terminal

PLACES = list(pages.places())


@pytest.mark.parametrize(("name", "block"), [(name, block) for _, name, block in PLACES])
def test_a_sample_is_what_its_command_prints(name: str, block: str) -> None:
    assert block == kept.block_of(name), "run `make samples`; without a cluster `python -m tests.samples`"


def test_every_sample_has_a_place() -> None:
    made = json.loads(kept.FILE.read_text(encoding="utf-8"))["samples"]
    assert {name for _, name, _ in PLACES} == {*made, *here.COMMANDS, kept.MADE}


def test_no_block_of_output_is_unmarked() -> None:
    for path in pages.DOCUMENTS:
        text = pages.PLACE.sub("", path.read_text(encoding="utf-8"))
        assert not re.search(r"^\$ hpc-serve", text, re.MULTILINE), path


def test_the_recording_asks_nobody_and_is_small() -> None:
    text = kept.RECORDING.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text) < 60_000
    assert re.findall(r"(?:href|src)=|url\(|@import|<script", text) == []
    assert "ready at" in re.sub(r"<[^>]*>", "", text)


def test_a_terminal_holds_what_a_program_draws() -> None:
    terminal = Terminal(3)
    terminal.write("one\r\ntwo\x1b[31m red\x1b[0m\r\n0 %")
    assert terminal.lines()[1] == (Span("two"), Span(" red", Style(colour="red")))
    terminal.write("\r\x1b[2K100 %\x1b[1A\r\x1b[2Kdone")
    assert ["".join(span.text for span in line) for line in terminal.lines()] == ["one", "done", "100 %"]
    terminal.write("\r\n\n\x1b[3")
    terminal.write("3mfour")
    assert terminal.scrolled == 1
    with pytest.raises(ValueError, match="unknown to this terminal"):
        terminal.write("\x1b[5X")


def test_a_recording_keeps_the_news_and_shortens_the_pauses() -> None:
    words = ["0:00:00 loading", "0:00:01 loading", "0:00:09 loading", "0:00:09 ready"]
    screens = [Screen(at_s, ((Span(text),),)) for at_s, text in zip((0.0, 1.0, 9.0, 60.0), words, strict=True)]
    kept_screens = chosen(screens)
    assert [screen.lines[0][0].text for screen in kept_screens] == [words[0], words[2], words[3]]
    assert shortened(kept_screens)[-1].at_s < 2
    text = svg(shortened(kept_screens), title="a <start>", columns=40)
    assert "a &lt;start&gt;" in text
    # Without motion the last screen is what is seen.
    assert [word for word in words if f">{word}<" in re.sub(r'<text[^>]*past">.*', "", text)] == [words[3]]
