"""Prints what was seen of each pain, a line each, and how many were named rightly, and when."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from tests.pains.pain import Pain, Seen

NOT_HERE: Mapping[int, str] = {
    9: "NCCL's errors between GPUs and of InfiniBand need both; they are cases of real logs",
}
"""Numbers of which a part, or all, cannot be brought about on one machine without GPUs, and why."""
_LONGEST = 90


@dataclass(frozen=True)
class Surroundings:
    """When, and beside what."""

    at: datetime
    load: float

    @classmethod
    def now(cls) -> Surroundings:
        return cls(datetime.now(timezone.utc), os.getloadavg()[0])


def heading() -> str:
    return _aligned("no.", "pain", "how", "right", "before weights", "s", "by", "what was said")


def line(pain: Pain, seen: Seen) -> str:
    before = "-" if seen.is_before_weights is None else "yes" if seen.is_before_weights else "no"
    said = seen.said if len(seen.said) <= _LONGEST else f"{seen.said[:_LONGEST]}…"
    number = str(pain.number) if pain.number else ""
    right = "yes" if pain.is_right(seen) else "WRONG" if seen.is_measured else "?"
    return _aligned(number, pain.name, pain.how, right, before, f"{seen.seconds:.0f}", seen.by, said)


def _aligned(number: str, name: str, how: str, right: str, before: str, seconds: str, by: str, said: str) -> str:
    return f"{number:>3}  {name:<16}  {how:<8}  {right:<5}  {before:<14}  {seconds:>3}  {by:<22}  {said}"


def summary(outcomes: Sequence[tuple[Pain, Seen]]) -> str:
    numbers = {pain.number for pain, seen in outcomes if seen.is_measured} - {0}
    real = {pain.number for pain, seen in outcomes if seen.is_measured and pain.how == "real"} - {0}
    before = {pain.number for pain, seen in outcomes if seen.is_before_weights and pain.is_right(seen)} - {0}
    wrong = [pain.name for pain, seen in outcomes if seen.is_measured and not pain.is_right(seen)]
    broken = [pain.name for pain, seen in outcomes if not seen.is_measured]
    return (
        f"{len(numbers)} of 25 brought about, {len(real)} of them for real; named before a weight was read: "
        f"{len(before)}; wrong: {', '.join(wrong) or 'none'}; not measured: {', '.join(broken) or 'none'}."
    )


def results_page(outcomes: Sequence[tuple[Pain, Seen]], begin: Surroundings, end: Surroundings) -> str:
    """The page that is kept of a run: what was seen, when, on what machine."""
    not_here = "\n".join(f"- {number}: {why}." for number, why in NOT_HERE.items())
    table = "\n".join([heading(), *(line(*one) for one in outcomes)])
    return f"""# What was named first of what goes wrong most

Printed by `python -m tests.pains --results FILE`. What each pain does says its function in `slurm_pains.py`,
`engine_pains.py` or `further_pains.py`. Those of `engine_pains.py`, `no_tokenizer_words` and `unknown_architecture`
start real vLLM on CPUs; in the others a stub stands in its place, on a real Slurm, and Ray is real.

s: from sbatch, or from the fault where the pain says so, until a user can know of it. before weights: no byte of the
weights was read by then; "-" where nothing had to be told. how: "stand-in" where a part was made up. right: the first
cause has the words that its function asks for; "?" where it broke, and why stands in the place of what was said.

{begin.at:%Y-%m-%d, %H:%M} to {end.at:%H:%M} UTC, {os.cpu_count()} cores ({platform.machine()}),
load {begin.load:.0f} at the begin and {end.load:.0f} at the end.

```
{table}
```

{summary(outcomes)}

Not brought about here:

{not_here}
"""
