"""No start uses a folder that another user can change: for its token, its logs, its node-local files or its code.

The stranger is anybody who can write to the folder, or (as root) the owner that it is given to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError, RecordError, StoreError
from hpc_serve.hub.local_weights import find_stand_in
from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.launcher import launch
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.job.prepare import prepare
from hpc_serve.job.run.node import LaunchOptions, read_token
from hpc_serve.rendezvous import files, ownership
from tests.support.strangers import STRANGER, give_away


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that everybody can write to, as a careless project folder."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def prepared(environ: dict[str, str]) -> dict[str, str]:
    return prepare("8b", read_allocation(environ), environ)


def test_a_home_below_a_folder_that_others_write_to_is_refused(environ, open_folder):
    with pytest.raises(StoreError, match=r"open can be changed by everybody .* Set HPC_SERVE_HOME"):
        prepared({**environ, "HPC_SERVE_HOME": str(open_folder / "home")})


def test_the_token_of_a_strangers_jobs_folder_is_not_made_or_read(environ, tmp_path):
    exports = prepared(environ)
    jobs = Path(exports["HPC_SERVE_JOB_DIR"]).parent
    give_away(jobs)
    with pytest.raises(StoreError, match=f"jobs belongs to user {STRANGER}"):
        prepared(environ)
    with pytest.raises(StoreError, match=f"jobs belongs to user {STRANGER}"):
        read_token(exports)


def test_a_token_that_others_can_read_is_not_used(environ):
    exports = prepared(environ)
    Path(exports["RAY_AUTH_TOKEN_PATH"]).chmod(0o644)
    with pytest.raises(RecordError, match="not secret any more"):
        read_token(exports)


def test_logs_are_not_written_where_others_can_put_links(environ, open_folder):
    for named in (open_folder, open_folder / "logs"):
        with pytest.raises(InvalidRequestError, match=r"HPC_SERVE_LOG_DIR=\S+ is not used: .* changed by everybody"):
            prepared({**environ, "HPC_SERVE_LOG_DIR": str(named)})
    open_folder.chmod(0o1777)  # as /tmp: in it a folder of ours is ours
    assert prepared({**environ, "HPC_SERVE_LOG_DIR": str(open_folder / "logs")})
    with pytest.raises(InvalidRequestError, match="can be changed by everybody"):
        prepared({**environ, "HPC_SERVE_LOG_DIR": str(open_folder)})


def test_a_node_local_root_without_a_sticky_bit_is_refused(open_folder):
    owner = node_dir.DirOwner(run_mark="m")
    with pytest.raises(InvalidRequestError, match=r"HPC_SERVE_TMPDIR=\S+ on .* is not used: .*without the sticky bit"):
        node_dir.make(open_folder / "hs-12345678", owner)
    assert list(open_folder.iterdir()) == []
    open_folder.chmod(0o1777)
    lock = node_dir.make(open_folder / "hs-12345678", owner)
    os.close(lock)


def test_compiled_code_is_not_loaded_from_where_others_can_put_it(environ, open_folder):
    exports = {**environ, **prepared(environ)}
    options = LaunchOptions(service="8b", backend="mp", gpus_per_node=0)
    for named in (open_folder, open_folder / "cache"):
        with_cache = {**exports, "HPC_SERVE_CACHE_DIR": str(named)}
        with pytest.raises(InvalidRequestError, match=r"HPC_SERVE_CACHE_DIR=\S+ on \S+ is not used"):
            launch(options, ["vllm", "serve", "8b"], read_allocation(environ), with_cache)


@pytest.fixture
def args(tmp_path) -> Path:
    """The file of words for the engine in the folder of a model."""
    path = tmp_path / "model" / "hpc-serve-args.txt"
    path.parent.mkdir()
    path.write_text("--max-num-seqs 8")
    return path


@pytest.mark.parametrize(
    ("of_file", "of_folder", "owner"), [(0o666, 0o755, 0), (0o644, 0o777, 0), (0o644, 0o755, STRANGER)]
)
def test_a_strangers_words_for_the_engine_are_not_taken(environ, args, of_file, of_folder, owner):
    args.chmod(of_file)
    args.parent.chmod(of_folder)
    if owner:
        give_away(args.parent)
    exports = {**environ, **prepared(environ), "HPC_SERVE_MODEL": str(args.parent), "HPC_SERVE_CACHE_SIZE": "0"}
    options = LaunchOptions(service="8b", backend="mp", gpus_per_node=0)
    with pytest.raises(InvalidRequestError, match=r"hpc-serve-args\.txt is not used: .* after --"):
        launch(options, ["vllm", "serve", "8b"], read_allocation(environ), exports)


def test_a_strangers_file_of_words_that_comes_and_goes_is_not_taken(args, monkeypatch):
    """Whatever a look at the name says, the file that is read is the one that is judged."""
    give_away(args)
    monkeypatch.setattr(ownership, "fault", lambda path, use: None)  # it was not there, or another, at that moment
    with pytest.raises(InvalidRequestError, match=f"belongs to user {STRANGER}"):
        find_stand_in({"HPC_SERVE_MODEL": str(args.parent)})


def test_a_pipe_in_place_of_the_words_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "hpc-serve-args.txt", 0o600)
    found = find_stand_in({"HPC_SERVE_MODEL": str(tmp_path)})
    assert found.args == ()


def test_a_log_folder_that_a_stranger_makes_a_moment_before_is_refused(tmp_path, monkeypatch):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o1777)

    def make_after_the_stranger(path: Path) -> None:
        path.mkdir()
        path.chmod(0o777)

    monkeypatch.setattr(files, "make_folders", make_after_the_stranger)
    with pytest.raises(InvalidRequestError, match="can be changed by everybody"):
        files.make_log_dir(open_folder / "logs", called="HPC_SERVE_LOG_DIR")
