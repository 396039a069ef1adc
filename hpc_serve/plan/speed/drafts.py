"""How many tokens a step gives where drafts are verified: as published for a draft model, for any number of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.plan.catalog import load_data
from hpc_serve.plan.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class KnownDraft:
    """What was published of a draft model: a step gave `tokens` with so many `drafts`. `texts` is what was asked."""

    model: str
    draft: str
    method: str
    drafts: int
    tokens: float
    texts: str
    source: str

    def acceptance_length(self, drafts: int) -> float:
        """Return the tokens of a step with another number of drafts, each accepted with the same probability.

        That is (1 - a^(drafts + 1)) ÷ (1 - a): equation 1 of arXiv:2211.17192. `a` follows from what was published.
        """
        if drafts == self.drafts:
            return self.tokens
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if _expected(middle, self.drafts) < self.tokens else (low, middle)
        return _expected(low, drafts)


def _expected(accepted: float, drafts: int) -> float:
    return sum(accepted**count for count in range(drafts + 1))


def known_drafts(model: str) -> list[KnownDraft]:
    """Return the draft models of which something was published, for a model by its repository's name."""
    return [KnownDraft(**one) for one in load_data("drafts.json")["drafts"] if one["model"].lower() == model.lower()]


def known_draft(model: str, engine: EngineConfig) -> KnownDraft | None:
    """Return what was published of the draft model that the engine loads, or of the model's own layers."""
    if not engine.speculative_tokens:
        return None
    name = "" if engine.speculates_with_own_layers else str((engine.speculative_config or {}).get("model"))
    return next((one for one in known_drafts(model) if one.draft.lower() == name.lower()), None)
