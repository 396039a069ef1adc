"""The plan's prediction of a run, in the figures that are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for all replicas together in tokens per second, and for one request in milliseconds.

    If there are no figures, `reason` says why.
    """

    output_rate: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    reason: str = ""

    def keys(self) -> dict[str, float | str | None]:
        """Under the keys of what is measured."""
        if self.reason:
            return {"reason": self.reason}
        return {
            "output_throughput": self.output_rate,
            "mean_ttft_ms": self.ttft_ms,
            "mean_tpot_ms": self.tpot_ms,
        }
