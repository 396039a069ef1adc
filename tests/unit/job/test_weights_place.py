"""Where a run's weights are, as its launcher sees them, and what the engine's command says after that."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hpc_serve.job.weights import weights_place
from hpc_serve.job.weights.weights_place import (
    filesystem_of,
    find_weights,
    known_strategies,
    with_strategy,
)
from hpc_serve.vllm.command import StandIn, read_command
from hpc_serve.vllm.load_strategy import STRATEGY

MOUNTS = """\
/dev/root / ext4 rw 0 0
tmpfs /scratch tmpfs rw 0 0
home:/vol /home nfs4 rw 0 0
gpfs0 /home/shared\\040data gpfs rw 0 0
/dev/sda /late xfs rw 0 0
server:/late /late beegfs rw 0 0
"""


@pytest.fixture
def mounts(tmp_path) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/x", "ext4"),
        ("/scratch/x", "tmpfs"),
        ("/scratcher/x", "ext4"),
        ("/home/u/x", "nfs4"),
        ("/home/shared data/x", "gpfs"),
        ("/late/x", "beegfs"),
    ],
)
def test_the_mount_with_the_longest_path_counts_and_of_two_the_last(mounts, path, kind):
    assert filesystem_of(Path(path), mounts) == kind


def test_links_are_followed(mounts, tmp_path):
    link = tmp_path / "model.safetensors"
    link.symlink_to("/home/u/blob")
    assert filesystem_of(link, mounts) == "nfs4"


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, size in (("a.safetensors", 1000), ("b.safetensors", 3000)):
        (folder / name).write_bytes(bytes(size))
    return folder


def test_sizes_are_those_of_the_files_that_are_read(model):
    place = find_weights(str(model), (), {})
    assert (place.total_bytes, place.largest_bytes) == (4000, 3000)
    assert place.available_bytes > 0
    assert place.filesystem == filesystem_of(model)


def test_weights_that_are_not_here_or_not_safetensors_are_vllms_matter(model, tmp_path):
    assert find_weights("org/model", (), {"HF_HOME": str(tmp_path)}) is None
    assert find_weights(str(model), ("--revision", "v2"), {}) is None
    for path in model.iterdir():
        path.rename(path.with_suffix(".bin"))
    assert find_weights(str(model), (), {}) is None


def command(model: Path, *words: str, stand_in: StandIn | None = None):
    return read_command(["vllm", "serve", str(model), *words], stand_in=stand_in)


def test_the_command_says_how_and_the_log_why(model, monkeypatch, caplog):
    monkeypatch.setattr(weights_place, "filesystem_of", lambda _: "gpfs")
    monkeypatch.setattr(weights_place, "known_strategies", lambda: ("lazy", "prefetch"))
    caplog.set_level("INFO")
    asked = command(model, "--max-num-seqs", "4")
    fast, reason = with_strategy(asked, {}, num_nodes=1)
    assert fast.argv == (*asked.argv, STRATEGY, "prefetch")
    assert reason in caplog.text
    assert "loading weights: prefetch: 4 KiB on gpfs" in caplog.text
    given = command(model, STRATEGY, "lazy")
    assert with_strategy(given, {}, num_nodes=1)[0].argv == given.argv
    assert "loading weights: lazy, as its command says" in caplog.text


def test_a_stand_in_is_what_is_looked_at(model, monkeypatch):
    monkeypatch.setattr(weights_place, "filesystem_of", lambda _: "gpfs")
    monkeypatch.setattr(weights_place, "known_strategies", lambda: ("prefetch",))
    asked = read_command(["vllm", "serve", "org/model"], stand_in=StandIn(folder=str(model)))
    assert with_strategy(asked, {}, num_nodes=1)[0].argv[-2:] == (STRATEGY, "prefetch")


def test_what_cannot_be_seen_ends_no_start(model, monkeypatch, caplog):
    def broken(_: Path) -> str:
        raise OSError("stale handle")

    monkeypatch.setattr(weights_place, "filesystem_of", broken)
    asked = command(model)
    same, reason = with_strategy(asked, {}, num_nodes=1)
    assert same == asked
    assert "cannot be seen: stale handle" in reason
    assert "stale handle" in caplog.text


def test_the_engines_own_source_says_what_it_has():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert {"lazy", "eager", "prefetch"} <= set(known_strategies())


def test_without_an_engine_there_are_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert known_strategies() == ()
