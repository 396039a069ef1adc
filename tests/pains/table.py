"""Prints what was seen of each pain, a line each, and how many were named rightly, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.pains.pain import Pain, Seen

NOT_HERE: Mapping[int, str] = {
    9: "NCCL's errors between GPUs and of InfiniBand need both; they are cases of real logs",
}
"""Numbers of which a part, or all, cannot be brought about on one machine without GPUs, and why."""
_LONGEST = 90


def heading() -> str:
    return _aligned("no.", "pain", "how", "right", "before weights", "s", "by", "what was said")


def line(pain: Pain, seen: Seen) -> str:
    before = "-" if seen.is_before_weights is None else "yes" if seen.is_before_weights else "no"
    said = seen.said if len(seen.said) <= _LONGEST else f"{seen.said[:_LONGEST]}…"
    number = str(pain.number) if pain.number else ""
    right = "yes" if pain.is_right(seen) else "WRONG"
    return _aligned(number, pain.name, pain.how, right, before, f"{seen.seconds:.0f}", seen.by, said)


def _aligned(number: str, name: str, how: str, right: str, before: str, seconds: str, by: str, said: str) -> str:
    return f"{number:>3}  {name:<16}  {how:<8}  {right:<5}  {before:<14}  {seconds:>3}  {by:<22}  {said}"


def summary(outcomes: Sequence[tuple[Pain, Seen]]) -> str:
    numbers = {pain.number for pain, _ in outcomes} - {0}
    real = {pain.number for pain, _ in outcomes if pain.how == "real"} - {0}
    before = {pain.number for pain, seen in outcomes if seen.is_before_weights} - {0}
    wrong = [pain.name for pain, seen in outcomes if not pain.is_right(seen)]
    return (
        f"{len(numbers)} of 25 brought about, {len(real)} of them for real; named before a weight was read: "
        f"{len(before)}; wrong: {', '.join(wrong) or 'none'}."
    )
