"""How often an engine that was ready is started again in place, and after how long. Pure."""

from __future__ import annotations

DEFAULT_RESTARTS = 3
_WAITS_S = (1.0, 5.0, 25.0)
# An engine that was ready for so long has recovered from what ended it before.
_RECOVERED_AFTER_S = 600.0


class Restarts:
    """The starts in place of one engine: `most` of them without 10 minutes of readiness in between.

    The first start of a run is none: an engine that was never ready ends its run, so that its cause is seen at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._used = 0
        self._was_ready = False

    @property
    def words(self) -> str:
        """Return a phrase for people about the latest restart."""
        return f"starting the engine again ({self._used} of {self.most})"

    def after_end(self, ready_s: float | None) -> float | None:
        """Return the seconds to the next restart after an end; None if the run is to end. `ready_s`: seconds the
        engine was ready, if ever."""
        self._was_ready = self._was_ready or ready_s is not None
        if ready_s is not None and ready_s >= _RECOVERED_AFTER_S:
            self._used = 0
        if not self._was_ready or self._used >= self.most:
            return None
        self._used += 1
        self.total += 1
        return _WAITS_S[min(self._used, len(_WAITS_S)) - 1]
