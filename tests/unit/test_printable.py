"""Text of others shows as text: nothing of it moves a terminal's cursor, sets its title, or hides a line."""

from __future__ import annotations

import pytest

from hpc_serve.printable import printable
from hpc_serve.rendezvous.fields import from_json_text, to_json_text
from hpc_serve.rendezvous.record import EndpointRecord
from tests.support.stubs import make_record


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loading\tweights\n", "loading\tweights\n"),
        ("Zürich 漢字 🙂", "Zürich 漢字 🙂"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("good\rbad", "good\\rbad"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("abc\u202ecba", "abc\\u202ecba"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert printable(text) == shown
    assert printable(printable(text)) == shown


def test_a_record_is_read_so():
    record = make_record(state="failed", reason="\x1b[31mred", last_log_lines=("a\x1b[2Jb",))
    read = from_json_text(EndpointRecord, to_json_text(record), source="a file")
    assert (read.reason, read.last_log_lines) == ("\\x1b[31mred", ("a\\x1b[2Jb",))
