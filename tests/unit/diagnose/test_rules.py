"""Every rule names the cause of what was seen in the field, and of nothing that healthy engines print."""

from __future__ import annotations

import configparser
from collections import Counter

import pytest

from hpc_serve.diagnose.causes import find_causes, first_cause, note_lines
from hpc_serve.diagnose.evidence import LogEvidence
from hpc_serve.diagnose.rules import RULES, filled, read_rules
from tests.unit.diagnose.cases_of_logs import FOLDER, read_cases

CASES = read_cases()
PAINS = range(1, 26)


def evidence(lines, source="n1.log"):
    return note_lines(LogEvidence(source), lines)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cause_of_a_case_is_named_first(case):
    found = first_cause([evidence(case.lines)])
    assert found.name == case.rule, found.sentence
    assert "{" not in found.cause.replace(found.lines[0].text, "")
    assert not found.cause.endswith(".")
    assert found.cure.endswith((".", ")"))
    assert found.lines[0].text[:14] in case.lines[found.lines[0].number - 1]


def test_every_rule_has_a_case_and_every_case_a_rule():
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}
    assert not [name for name, count in Counter(rule.name for rule in RULES).items() if count > 1]


@pytest.mark.parametrize("pain", PAINS)
def test_every_pain_has_a_rule(pain):
    assert [rule.name for rule in RULES if pain in rule.pains]


def test_a_rule_has_alternatives_on_lines_and_sentences_over_several():
    line, cause = "line =\n    a (?P<what>b)\n    c", "cause = the {what}[[ is {what}]]"
    (rule,) = read_rules(f"[one]\n{line}\n{cause}\ncure = Do this\n    #now.\npains = 1 2\n")
    assert (rule.pattern.pattern, rule.cure, rule.pains) == ("a (?P<what>b)|c", "Do this #now.", (1, 2))
    assert filled(rule.cause, rule.pattern.search("a b")) == "the b is b"
    assert filled(rule.cause, rule.pattern.search("c")) == "the "


@pytest.mark.parametrize("wrong", ["kind = sometimes", "cur = x", "cause = twice", "in_notes"])
def test_a_wrong_rule_is_refused(wrong):
    with pytest.raises((ValueError, TypeError, configparser.Error)):
        read_rules(f"[one]\nline = a\ncause = b\ncure = c\n{wrong}\n")


def test_every_case_says_where_it_was_seen():
    assert all(case.source and case.lines for case in CASES)


# What vLLM, Ray, torch and NCCL print where nothing is wrong, and what goes wrong without an effect.
HEALTHY = (FOLDER / "harmless.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "line", [None, *(line for line in HEALTHY if not line.startswith(("Permission", "Attribute")))]
)
def test_nothing_is_wrong_with_what_healthy_engines_print(line):
    lines = HEALTHY if line is None else [line]
    assert find_causes([evidence(lines)]) == ()


def test_nothing_is_wrong_with_the_log_of_a_real_engine():
    """vLLM 0.32 on CPU, started for this. What it said before it was up would be forgotten otherwise."""
    lines = (FOLDER / "healthy.txt").read_text().splitlines()
    assert find_causes([evidence(line for line in lines if "startup complete" not in line)]) == ()


@pytest.mark.parametrize("text", ["x", "x_", "/", "a.", "A-1", "a/b:", "key='", "Error: "])
def test_a_rule_looks_at_a_long_line_once(text):
    """The launcher reads the engine's lines with the rules. One that began anew at each character would take hours."""
    line = (text * 400_000)[:400_000]
    assert not any(rule.pattern.search(line) for rule in RULES)
