"""Every benchmark that needs no real engine runs in its short form, and RESULTS.md holds what the JSON files hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import start_calls
from benchmarks.common import ROOT, Benchmark, Measured, document, run_alone
from benchmarks.guide_tables import ON_PREM_GUIDE, TPU_GUIDE

KNOWN = {one.name: one for one in program.all_benchmarks()}
# What `make versions` does without: the package of the gateway, an extra.
PACKAGES = {"gateway_rate": "uvicorn"}


def test_each_has_the_name_of_its_module_and_says_what_it_measures() -> None:
    for name, benchmark in KNOWN.items():
        assert benchmark.measure.__module__ == f"benchmarks.{name}"
        assert f"`python -m benchmarks.{name}`" in benchmark.about.split("\n\n")[0]


@pytest.mark.parametrize("name", [name for name, one in KNOWN.items() if not one.needs])
def test_the_short_form_runs(name: str, tmp_path: Path) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    file = tmp_path / "found.json"
    run_alone(KNOWN[name], ["--short", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["short"]
    assert found["rows"]
    for row in found["rows"]:
        assert row["figures"], row
        for figure in row["figures"].values():
            assert len(figure["rounds"]) == 1


def test_the_commands_for_the_guides_tables_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "measure.md").read_text().replace("\\\n    ", "")
    for command in (TPU_GUIDE, ON_PREM_GUIDE):
        assert f"\n{command}\n" in page


def test_results_are_what_the_files_say() -> None:
    text = program.RESULTS_TEXT.read_text() if program.RESULTS_TEXT.exists() else program.HEAD
    assert text == program.results_text(), "run `python -m benchmarks --only NAME`, or take back the change by hand"


def _pairs(_: object, measured: Measured) -> None:
    ours, theirs = iter([2.0, 6.0, 3.0]), iter([1.0, 2.0, 3.0])
    turns = {"theirs": lambda: {"ms": next(theirs)}, "ours": lambda: {"ms": next(ours)}}
    measured.take_turns("a case", turns, rounds=3, base="theirs", warm=False)
    measured.notes.append("A note.")


PAIRS = Benchmark(name="pairs", about="What pairs show: `python`. A second.\n\nMore.", measure=_pairs, rounds=3)


def test_medians_spread_and_ratios_by_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_alone(PAIRS, ["--json", str(tmp_path / "one.json")])
    theirs, ours = (row["figures"]["ms"] for row in found["rows"])
    assert (theirs["median"], theirs["least"], theirs["most"], theirs["rounds"]) == (2, 1, 3, [1, 2, 3])
    assert "ratio" not in theirs
    assert ours["ratio"]["rounds"] == [2, 3, 1]
    assert (ours["ratio"]["median"], ours["more"]) == (2, 1)
    assert json.loads((tmp_path / "one.json").read_text()) == found
    printed = capsys.readouterr().out
    assert "| a case | ours   | 3 (2 to 6) | 2.00, +1    |" in printed
    assert "What pairs show." in printed
    assert "A note." in printed


def test_the_program_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "results"
    monkeypatch.setattr(program, "RESULTS", kept)
    monkeypatch.setattr(program, "RESULTS_TEXT", tmp_path / "RESULTS.md")
    found = run_alone(PAIRS, [])
    monkeypatch.setattr(program, "run", lambda benchmark, short: found if benchmark.name != "balance" else None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "plan_speed", "--json", str(tmp_path / "all.json")])
    program.main()
    assert json.loads((kept / "plan_speed.json").read_text()) == found
    assert json.loads((tmp_path / "all.json").read_text()) == [found]
    assert (tmp_path / "RESULTS.md").read_text() == "\n".join([program.HEAD, *document(found)])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "balance"])
    with pytest.raises(SystemExit, match="failed: balance"):
        program.main()
    assert not (kept / "balance.json").exists()


def test_the_short_form_of_all_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(program, "run", lambda benchmark, short: ran.append(benchmark.name) or {"short": short})
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--short"])
    program.main()
    assert ran == [name for name, one in KNOWN.items() if not one.needs]
    assert not (tmp_path / "results").exists()


def test_calls_of_a_launcher_and_its_threads_are_counted():
    """Those of its children are not, and a call whose end comes later counts once."""
    lines = """\
7 openat(AT_FDCWD</>, "/home/a/.hpc-serve/services/8b/1.json", O_RDONLY) = 3
7 clone3({flags=CLONE_VM|CLONE_THREAD|CLONE_SETTLS, child_tid=0x7f}, 88 <unfinished ...>
8 epoll_wait(4<anon_inode:[eventpoll]>,  <unfinished ...>
7 <... clone3 resumed> => {parent_tid=[8]}, 88) = 8
8 epoll_wait(4<anon_inode:[eventpoll]>, [], 2, 100) = 0
8 sendto(5<TCP:[10.0.0.1:9->10.0.0.2:8]>, ""..., 9, 0, NULL, 0) = 9
8 write(1<pipe:[77]>, ""..., 9) = 9
7 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7f) = 9
9 sendto(5<TCP:[10.0.0.1:9->10.0.0.2:8]>, ""..., 9, 0, NULL, 0) = 9
7 read(3</home/a/.hpc-serve/services/8b/1.json>, ""..., 99) = 9
7 +++ exited with 0 +++
"""
    counted = start_calls.count(lines.splitlines(), "/home/a/.hpc-serve")
    assert counted == {start_calls.MESSAGES: 1, start_calls.WAITS: 1, start_calls.FILES: 2}
