"""How many requests of a batch may be under way: as many as the replicas take, and no long queue at any of them.

The first bound is the sum of the replicas' --max-num-seqs. The window shrinks where requests wait at the engines, and
grows again where few wait. So several clients of one service share it.
"""

from __future__ import annotations

from pathlib import Path

from hpc_serve.batch.progress import Progress
from hpc_serve.client.access import open_store
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.engine_work import WorkWatch

_USUAL_SEQUENCES = 256  # of a replica whose record has no plan
_QUEUE_SHARE = 8  # an eighth of what runs may wait, so that an engine never lacks work


def next_window(window: int, most: int, *, running: float, waiting: float) -> int:
    """Return the next bound on requests under way.

    >>> next_window(288, 288, running=256, waiting=30), next_window(288, 288, running=64, waiting=224)
    (288, 230)
    >>> next_window(100, 288, running=100, waiting=0)
    118
    >>> next_window(5, 9, running=5, waiting=0)
    6
    """
    if waiting > running / _QUEUE_SHARE:
        return max(1, window * 4 // 5)
    return min(max(most, 1), window + max(1, most // 16))


class ReplicaView:
    """Looks at the replicas of a service and writes what it sees into `progress`. For one thread at a time."""

    def __init__(self, service: str, home: str | Path | None, progress: Progress, clients: int) -> None:
        store = open_store(home)
        self._watch = ServiceWatch(store, service)
        self._works = WorkWatch(store.read_api_key)
        self._progress = progress
        self._clients = clients

    def look(self, passed_s: float) -> None:
        """Renew window, replicas and GPU-hours; `passed_s` seconds went by since the last look."""
        status, progress = self._watch.refresh(is_complete=True), self._progress
        ready = status.ready
        gpus = sum(
            one.record.num_gpus
            for one in status.replicas
            if one.record is not None and not one.is_over and one.state != "unknown"
        )
        progress.gpu_hours += gpus * passed_s / 3600
        progress.replicas = len(ready)
        takes = sum(int(one.predicted.get("max_num_seqs") or _USUAL_SEQUENCES) for one in ready)
        most = takes + takes // _QUEUE_SHARE
        if not progress.window:
            progress.window = max(1, most // self._clients)
            return
        works = [work.now for work in self._works.look(ready)]
        running = [work.running for work in works if work.running is not None]
        waiting = [work.waiting for work in works if work.waiting is not None]
        if works and len(running) == len(waiting) == len(works):  # one too busy to say leaves the window as it is
            progress.window = next_window(progress.window, most, running=sum(running), waiting=sum(waiting))
