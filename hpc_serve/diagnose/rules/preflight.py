"""What the preflight found before the engine was started. Its own words name the cause and the cure."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "preflight",
        r"preflight check (?P<check>[\w-]+): failed on (?P<cause>.+?)\. To do: (?P<cure>.+)",
        "on {cause}",
        "{cure}.",
    ),
)
