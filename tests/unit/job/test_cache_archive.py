"""A node that has nothing of an engine begins with an archive of the home: a whole one, of ours, of such a machine."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.job.cache import engine_cache
from hpc_serve.job.cache.cache_archive import CacheArchive
from hpc_serve.job.cache.engine_cache import open_cache
from tests.support.nodes import ALONE
from tests.support.strangers import give_away

KEY = "0123456789abcdef"


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    return {"HPC_SERVE_CACHE_DIR": str(tmp_path / "named"), "HPC_SERVE_HOME": str(tmp_path / "home")}


def start(environ, rank: int = 0) -> str:
    """One run whose engine compiles and becomes ready: its words."""
    with open_cache(KEY, Path("/nonexistent"), environ, replace(ALONE, node_rank=rank)) as cache:
        graph = cache.path / "vllm" / "graph.so"
        assert graph.exists() == cache.is_warm
        if not cache.is_warm:
            graph.parent.mkdir()
            graph.write_text("compiled " * 1000)
            os.utime(graph, (1.0, 1.0))
        assert (graph.read_text()[:9], graph.stat().st_mtime) == ("compiled ", 1.0)
        cache.note_ready()
        cache.write_archive()
        return cache.words


def on_a_new_node(environ, rank: int = 0) -> str:
    for path in Path(environ["HPC_SERVE_CACHE_DIR"]).iterdir():
        path.rename(path.parent.with_name(f"gone-{os.urandom(4).hex()}"))
    return start(environ, rank)


def archives(environ) -> list[Path]:
    return sorted((Path(environ["HPC_SERVE_HOME"]) / "caches").iterdir())


def test_another_node_is_warm_from_the_archive(environ):
    assert start(environ).startswith("cold")
    (archive,) = archives(environ)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert archive.parent.stat().st_mode & 0o777 == 0o700
    assert on_a_new_node(environ) == f"warm, from {archive} in {environ['HPC_SERVE_CACHE_DIR']}/{KEY}-0"
    assert start(environ).endswith("on this node")
    assert archives(environ) == [archive]


def test_of_another_machine_rank_or_path_it_is_not_used(environ, monkeypatch, tmp_path):
    start(environ)
    assert on_a_new_node(environ, rank=1).startswith("cold")
    assert start({**environ, "HPC_SERVE_CACHE_DIR": str(tmp_path / "elsewhere")}).startswith("cold")
    monkeypatch.setattr(engine_cache, "machine_key", lambda: "another")
    assert on_a_new_node(environ).startswith("cold")


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "a byte", "the checksum"])
def test_a_damaged_one_is_not_used_and_replaced(environ, damage):
    start(environ)
    (archive,) = archives(environ)
    content = archive.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:-9],
        "empty": b"",
        "garbage": b"\0" * len(content),
        "a byte": content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :],
        "the checksum": content[:-8] + b"\1\2\3\4" + content[-4:],
    }
    archive.write_bytes(damaged[damage])
    assert on_a_new_node(environ).startswith("cold")
    assert on_a_new_node(environ).startswith("warm")


@pytest.mark.parametrize("attack", ["its file", "its folder", "a link", "an open folder", "an open file", "a pipe"])
def test_one_that_a_stranger_can_have_changed_is_not_used(environ, tmp_path, attack):
    start(environ)
    (archive,) = archives(environ)
    if attack in ("its file", "its folder"):
        give_away(archive if attack == "its file" else archive.parent)
    elif attack == "a link":
        archive.rename(tmp_path / "strangers.tar.gz")
        archive.symlink_to(tmp_path / "strangers.tar.gz")
    elif attack == "a pipe":
        archive.unlink()
        os.mkfifo(archive, 0o600)
    else:
        (archive.parent if attack == "an open folder" else archive).chmod(0o777)
    assert on_a_new_node(environ).startswith("cold")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../evil", tarfile.REGTYPE), ("/evil", tarfile.REGTYPE), ("in", tarfile.SYMTYPE), ("in", tarfile.LNKTYPE)],
)
def test_nothing_is_written_outside_the_folder(tmp_path, name, kind):
    """Not even by an archive of ours: what holds it may have been damaged."""
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = CacheArchive.of(tmp_path, folder, key=KEY, machine="m", rank=0, limit_bytes=1 << 20)
    archive.path.parent.mkdir(mode=0o700)
    with tarfile.open(archive.path, "w:gz") as file:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd" if kind != tarfile.REGTYPE else ""
        member.size = 4 if kind == tarfile.REGTYPE else 0
        file.addfile(member, io.BytesIO(b"evil"))
    archive.path.chmod(0o600)
    with pytest.raises(OSError, match="is damaged"):
        archive.unpack(folder)
    assert (list(folder.iterdir()), (tmp_path / "evil").exists()) == ([], False)


def test_all_are_bounded_and_what_is_too_large_is_not_archived(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "graph").write_bytes(os.urandom(40_000))
    *written, too_large = (
        CacheArchive.of(tmp_path, folder, key=KEY, machine="m", rank=rank, limit_bytes=100_000) for rank in range(4)
    )
    for number, archive in enumerate(written):
        archive.pack(folder)
        os.utime(archive.path, (number, number))
    written[0].pack(folder)
    assert [archive.path.exists() for archive in written] == [True, False, True]
    (folder / "graph").write_bytes(os.urandom(200_000))
    too_large.pack(folder)
    assert not too_large.path.exists()


def test_it_can_be_switched_off(environ):
    start({**environ, "HPC_SERVE_CACHE_ARCHIVE_SIZE": "0"})
    assert not (Path(environ["HPC_SERVE_HOME"]) / "caches").exists()
    assert on_a_new_node(environ).startswith("cold")


def test_one_with_which_no_engine_starts_is_removed(environ):
    start(environ)
    with open_cache(KEY, Path("/nonexistent"), environ, ALONE) as cache:
        assert cache.is_warm
        cache.discard()
        assert list(cache.path.iterdir()) == []
    assert archives(environ) == []


def test_a_home_that_is_full_or_read_only_stops_nobody(environ, tmp_path, monkeypatch):
    (tmp_path / "home").rmdir()
    (tmp_path / "home").write_text("")
    assert start(environ).startswith("cold")
    assert start(environ).endswith("on this node")
