"""Whether a run has the caches of an earlier one: those of this machine with which an engine became ready."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cache import engine_cache
from hpc_serve.job.cache.engine_cache import cache_key, machine_key, open_cache
from hpc_serve.vllm.command import read_command
from tests.support.strangers import give_away

KEY = "0123456789abcdef"


@pytest.fixture
def node_dir(tmp_path):
    return tmp_path / "hs-00000001"


@pytest.fixture
def environ(tmp_path):
    return {"HPC_SERVE_CACHE_DIR": str(tmp_path / "named"), "HPC_SERVE_HOME": str(tmp_path / "home")}


@pytest.fixture
def scratch(tmp_path):
    """A folder as /tmp is."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def start(environ, node_dir, *, is_ready=True, key=KEY) -> tuple[bool, str]:
    """One run whose engine compiles: whether it was warm, and its words."""
    with open_cache(key, node_dir, environ) as cache:
        graph = cache.path / "vllm" / "graph"
        assert graph.exists() == cache.is_warm
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text("compiled")
        if is_ready:
            cache.note_ready()
        return cache.is_warm, cache.words


def test_the_second_start_is_warm_and_says_from_where(environ, node_dir):
    path = Path(environ["HPC_SERVE_CACHE_DIR"]) / f"{KEY}-0"
    assert start(environ, node_dir) == (False, f"cold, kept in {path} (no engine was ready with it yet)")
    assert start(environ, node_dir) == (True, f"warm, from {path} on this node")
    assert start(environ, node_dir, key="f" * 16)[0] is False


def test_what_an_engine_left_that_was_not_ready_is_not_used(environ, node_dir):
    start(environ, node_dir, is_ready=False)
    assert start(environ, node_dir)[0] is False
    assert start(environ, node_dir, is_ready=False)[0] is True
    assert start(environ, node_dir)[0] is True, "a start that was cancelled has damaged nothing"


def test_on_several_nodes_a_start_that_fails_leaves_nothing(environ, node_dir):
    def warm(*, is_ready: bool) -> bool:
        with open_cache(KEY, node_dir, environ, on_several_nodes=True) as cache:
            if is_ready:
                cache.note_ready()
            return cache.is_warm

    assert [warm(is_ready=ready) for ready in (True, True, False, True, False)] == [False, True, True, False, True]


def test_code_for_another_processor_is_not_used(environ, node_dir, monkeypatch):
    start(environ, node_dir)
    monkeypatch.setattr(engine_cache, "machine_key", lambda: "another")
    assert start(environ, node_dir)[1].endswith("(it was of another kind of machine)")


def test_the_engine_is_told_of_every_cache(environ, node_dir):
    with open_cache(KEY, node_dir, environ) as cache:
        told = cache.environ()
    assert all(value == "1" or value.startswith(f"{cache.path}/") for value in told.values())
    assert set(told) == {
        *("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"),
        *("VLLM_XLA_CACHE_PATH", "VLLM_ENABLE_STARTUP_PLAN"),
    }


def test_it_can_be_switched_off(environ, node_dir):
    with open_cache(KEY, node_dir, {**environ, "HPC_SERVE_CACHE_SIZE": "0"}) as cache:
        assert (cache.path, cache.is_warm) == (node_dir / "cache", False)
        assert cache.words == "cold, and not kept: HPC_SERVE_CACHE_SIZE=0"
        assert "VLLM_ENABLE_STARTUP_PLAN" not in cache.environ()
        cache.note_ready()
    assert not Path(environ["HPC_SERVE_CACHE_DIR"]).exists()


def test_a_size_that_is_none_is_refused(environ, node_dir):
    with (
        pytest.raises(InvalidRequestError, match=r"HPC_SERVE_CACHE_SIZE: 'much' is no size: .* 0 keeps nothing"),
        open_cache(KEY, node_dir, {**environ, "HPC_SERVE_CACHE_SIZE": "much"}),
    ):
        pass


def test_where_nothing_was_named_it_lies_beside_the_runs_folders(scratch, node_dir):
    environ = {"HPC_SERVE_TMPDIR": str(scratch), "HPC_SERVE_HOME": str(scratch / "home")}
    start(environ, node_dir)
    root = scratch / f"hpc-serve-cache-{os.geteuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert start(environ, node_dir) == (True, f"warm, from {root}/{KEY}-0 on this node")


@pytest.mark.parametrize("attack", ["a stranger's folder", "an open folder", "a link", "a file", "no sticky bit"])
def test_a_folder_that_a_stranger_made_first_is_not_used(scratch, node_dir, tmp_path, attack):
    """Its name is known to everybody. The run goes on in its private folder, and says why."""
    root = scratch / f"hpc-serve-cache-{os.geteuid()}"
    planted = root
    if attack == "a link":
        planted = tmp_path / "strangers"
        root.symlink_to(planted)
    if attack == "a file":
        root.write_text("")
    else:
        (planted / f"{KEY}-0" / "vllm").mkdir(parents=True)
        (planted / f"{KEY}-0" / "vllm" / "graph").write_text("evil")
        (planted / f"{KEY}-0" / "ready").write_text(machine_key())
        planted.chmod(0o777 if attack == "an open folder" else 0o700)
    if attack == "no sticky bit":
        scratch.chmod(0o777)
    if attack in ("a stranger's folder", "a link"):
        give_away(planted)
    with open_cache(
        KEY, node_dir, {"HPC_SERVE_TMPDIR": str(scratch), "HPC_SERVE_HOME": str(scratch / "home")}
    ) as cache:
        assert (cache.path, cache.is_warm, cache.lock) == (node_dir / "cache", False, None)
        assert cache.words.startswith("cold, and not kept: ")
        assert str(root) in cache.words or str(planted) in cache.words or str(scratch) in cache.words
    if attack != "a file":
        assert (planted / f"{KEY}-0" / "vllm" / "graph").read_text() == "evil", "a stranger's files are let be"


def test_a_root_that_cannot_be_made_is_said(tmp_path, node_dir):
    (tmp_path / "file").write_text("")
    with open_cache(KEY, node_dir, {"HPC_SERVE_CACHE_DIR": str(tmp_path / "file" / "below")}) as cache:
        assert cache.words.startswith("cold, and not kept: ")
        assert str(tmp_path / "file") in cache.words


def test_a_key_is_of_model_layout_and_versions(tmp_path):
    def key(words: str, **options) -> str:
        return cache_key(read_command(words.split()), **{"device": "GPU", "num_nodes": 1, **options})

    model = tmp_path / "model"
    model.mkdir()
    plain = key(f"vllm serve {model}")
    assert key(f"vllm serve {model} --served-model-name x --port 8000") == plain
    assert len({plain, key(f"vllm serve {model} -tp 2"), key(f"vllm serve {model}", num_nodes=2)}) == 3
    (model / "config.json").write_text("{}")
    assert key(f"vllm serve {model}") != plain


def test_a_machine_is_its_processor_and_gpus(tmp_path):
    cpus, gpus = tmp_path / "cpuinfo", tmp_path / "gpus"
    cpus.write_text("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 2000\n")
    before = machine_key(cpus=cpus, gpus=gpus)
    cpus.write_text("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 3000\n")
    assert machine_key(cpus=cpus, gpus=gpus) == before
    (gpus / "0").mkdir(parents=True)
    (gpus / "0" / "information").write_text("Model: \t\t H100\nIRQ:   1\n")
    with_gpu = machine_key(cpus=cpus, gpus=gpus)
    cpus.write_text("model name\t: A\nflags\t\t: avx2 avx512f\n")
    assert len({before, with_gpu, machine_key(cpus=cpus, gpus=gpus)}) == 3
