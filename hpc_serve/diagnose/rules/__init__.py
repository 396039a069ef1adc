"""The known causes, as data: which line means which, in one sentence, and what to do about it.

The rules stand in the order in which they are tried on a line: the first that fits counts. `rule.py` says what a
rule is.
"""

from __future__ import annotations

from hpc_serve.diagnose.rules import environment, gpus, memory, model, network, preflight, ray, slurm
from hpc_serve.diagnose.rules.rule import Kind, Rule

RULES: tuple[Rule, ...] = (
    *preflight.RULES,  # first: its words name what other rules know
    *memory.RULES,
    *model.RULES,
    *gpus.RULES,
    *slurm.RULES,
    *ray.RULES,
    *network.RULES,
    *environment.RULES,
)
"""All rules."""

__all__ = ["RULES", "Kind", "Rule"]
