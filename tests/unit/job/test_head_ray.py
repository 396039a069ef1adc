"""Ray as its head's launcher follows it: what it waits for, by the lines that Ray's head prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hpc_serve.job.ray.ray_cluster import HeadRay
from tests.support.nodes import make_node
from tests.unit.job.conftest import in_a_loop

LINES = ('{"hpc_serve_ray": [4321, {}]}', '{"hpc_serve_ray": [4321, {"127.0.0.1": 1}]}')


class Parts:
    """Waits by the lines above, and keeps what was missing."""

    def __init__(self) -> None:
        self.said: list[str | None] = []
        self.changes = 0
        self.ray: Any = None

    def require_command(self, name: str, command: str, environ: object) -> None:
        pass

    def note_change(self) -> None:
        self.changes += 1

    async def wait_until_complete(self, missing: Any, *, part: str, within_s: float) -> None:
        assert part == "ray head"
        self.said.append(missing())
        for line in LINES:
            self.ray.read_line(line)
            self.said.append(missing())


class Keeper:
    def set_phrase(self, *words: object) -> None:
        pass


@in_a_loop
async def test_others_join_once_the_head_is_a_node_of_its_ray(tmp_path: Path):
    """Ray has a node that comes before the head look again only after two seconds."""
    parts = Parts()
    parts.ray = ray = HeadRay(make_node(tmp_path), cast(Any, parts), cast(Any, Keeper()))
    environ = await ray.engine_environ()
    not_joined = "n1 (127.0.0.1) has not joined the Ray that it started"
    assert parts.said == ["Ray's GCS does not listen", not_joined, None]
    assert environ["RAY_ADDRESS"] == "127.0.0.1:4321"
    assert parts.changes == len(LINES)
