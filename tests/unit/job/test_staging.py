"""The copy of a model on a node: what is copied, who shares it, when it is removed, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.hub.local_weights import missing_weights, weight_files
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.weights import staging
from hpc_serve.job.weights.stage_folder import remove_unused, stage_base
from hpc_serve.job.weights.staging import CopyStoppedError, Staging, plan_staging
from hpc_serve.units import MIB
from hpc_serve.vllm.command import StandIn, read_command
from tests.support.fake_hub import cached
from tests.support.patience import wait_until
from tests.support.strangers import give_away
from tests.unit.job.conftest import safetensors

LONG_S = 120


@pytest.fixture
def model(tmp_path) -> Path:
    """A model as the hub's cache holds it: links to blobs."""
    blobs, folder = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    (folder / "1_Pooling").mkdir(parents=True)
    files = {
        "config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "README.md": b"words",
        "pytorch_model.bin": b"again",
        "a.safetensors": safetensors(os.urandom(3 * MIB)),
        "b.safetensors": safetensors(os.urandom(MIB + 5)),
    }
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(content)
        (folder / name).symlink_to(blobs / str(number))
    return folder


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    (tmp_path / "scratch").mkdir(mode=0o700)
    return {
        "HPC_SERVE_STAGE": str(tmp_path / "scratch"),
        "HPC_SERVE_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hf"),
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(staging, "_BLOCK_BYTES", MIB)
    monkeypatch.setattr(staging, "_PIECE_BYTES", MIB // 4)
    monkeypatch.setattr(staging, "_SPARE_BYTES", 0)


def command(model: Path | str, *words: str):
    return read_command(["vllm", "serve", str(model), *words])


def planned(model: Path | str, environ) -> Staging:
    return plan_staging(command(model), stage_base(environ), environ)


@pytest.fixture
def copy(model, environ) -> Iterator[Staging]:
    """The copy that a run of the model wants; it is let go at the end."""
    copy = planned(model, environ)
    yield copy
    copy.close()


def ignore(done: int, total: int) -> None:
    pass


def test_what_the_engine_reads_is_copied_with_the_content_of_links(copy, model):
    told = list[tuple[int, int]]()
    copy.open(lambda done, total: told.append((done, total)))
    found = {str(path.relative_to(copy.target)): path for path in copy.target.rglob("*") if path.is_file()}
    assert set(found) == {"config.json", "1_Pooling/config.json", "a.safetensors", "b.safetensors", "ready"}
    for name in set(found) - {"ready"}:
        assert not found[name].is_symlink()
        assert found[name].read_bytes() == (model / name).read_bytes()
    assert told[-1] == (copy.total_bytes, copy.total_bytes)
    assert copy.target.stat().st_mode & 0o777 == 0o700
    copy.close()
    assert list(copy.target.parent.iterdir()) == []


def test_runs_of_one_node_share_a_copy_and_the_last_one_removes_it(model, environ):
    first, second = planned(model, environ), planned(model, environ)
    assert first.target == second.target
    first.open(ignore)
    told = list[int]()
    second.open(lambda done, total: told.append(done))
    assert told == []
    first.close()
    assert second.is_whole
    assert remove_unused(environ) == []
    second.close()
    assert not second.target.exists()


def test_a_second_run_waits_while_the_first_copies(model, environ):
    first, second = planned(model, environ), planned(model, environ)
    begun, may_go_on = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert may_go_on.wait(LONG_S)

    copying = threading.Thread(target=first.open, args=(hold,))
    copying.start()
    assert begun.wait(LONG_S)
    told = list[int]()
    waiting = threading.Thread(target=second.open, args=(lambda done, total: told.append(done),))
    waiting.start()
    may_go_on.set()
    copying.join()
    waiting.join()
    assert told == []
    first.close()
    assert second.is_whole
    second.close()


def test_changed_files_are_another_copy(model, environ):
    before = planned(model, environ).target
    (model / "config.json").unlink()
    (model / "config.json").write_text('{"new": 1}')
    assert planned(model, environ).target != before


def test_a_run_that_ends_meanwhile_stops_the_copy_and_leaves_nothing(copy, environ):
    with pytest.raises(CopyStoppedError):
        copy.open(lambda done, total: copy.stop.set())
    assert not copy.target.exists()
    copy.close()
    assert remove_unused(environ) in ([], [copy.target])
    assert list(copy.target.parent.iterdir()) == []


KILLED = """
import sys, os
from pathlib import Path
from hpc_serve.job.weights import staging
from hpc_serve.vllm.command import read_command
staging._SPARE_BYTES = 0
base = Path(os.environ["HPC_SERVE_STAGE"])
copy = staging.plan_staging(read_command(["vllm", "serve", sys.argv[1]]), base, os.environ)
copy.open(lambda done, total: None)
Path(sys.argv[2]).touch()
sys.stdin.read()
"""


@pytest.fixture
def killed(model, environ, tmp_path) -> Staging:
    """The copy of a run that was killed."""
    code, mark = [sys.executable, "-c", KILLED, str(model), str(tmp_path / "open")], tmp_path / "open"
    program = subprocess.Popen(code, stdin=subprocess.PIPE, env={**os.environ, **environ})
    try:
        wait_until(mark.exists, within_s=LONG_S)
        assert remove_unused(environ) == []
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate()
    return planned(model, environ)


def test_what_a_killed_run_left_is_swept_or_used(killed, environ):
    assert killed.is_whole
    told = list[int]()
    killed.open(lambda done, total: told.append(done))
    assert told == []
    os.close(killed._lock)
    assert remove_unused(environ) == [killed.target]
    assert list(killed.target.parent.iterdir()) == []


def test_a_copy_that_is_not_whole_is_made_anew(copy, model, environ):
    left = planned(model, environ)
    left.open(ignore)
    os.close(left._lock)
    (left.target / "ready").unlink()
    (left.target / "a.safetensors").write_bytes(b"half")
    copy.open(ignore)
    assert (copy.target / "a.safetensors").read_bytes() == (model / "a.safetensors").read_bytes()


@pytest.mark.parametrize("what", ["an open folder", "a file", "a link", "a stranger's folder"])
def test_where_another_user_has_taken_the_folders_name_the_next_start_has_another(model, environ, tmp_path, what):
    taken = planned(model, environ).target.parent
    taken.rmdir()
    if what == "a file":
        taken.touch()
    elif what == "a link":
        taken.symlink_to(tmp_path)
    else:
        taken.mkdir()
        taken.chmod(0o777 if what == "an open folder" else 0o700)
        if what == "a stranger's folder":
            give_away(taken)
    with pytest.raises(PortsInUseError, match="another name is needed"):  # the script starts again
        planned(model, environ)
    assert remove_unused(environ) == []
    copy = planned(model, environ)
    assert copy.target.parent != taken
    copy.open(ignore)
    assert copy.is_whole
    copy.close()


def test_nobody_can_guess_the_folder_of_a_home(model, environ, tmp_path):
    elsewhere = planned(model, environ | {"HPC_SERVE_HOME": str(tmp_path / "other")}).target.parent
    assert elsewhere.name != planned(model, environ).target.parent.name


def test_below_a_folder_where_others_can_replace_it_nothing_is_copied(model, environ, tmp_path):
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(InvalidRequestError, match=r"HPC_SERVE_STAGE=\S+ is not used: .*without the sticky bit"):
        planned(model, environ)


def test_no_room_is_said_with_its_number(model, environ, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    copy = planned(model, environ)
    with pytest.raises(DoesNotFitError, match=r"--stage copies 4 MiB to .*, which has 1 MiB free.*HPC_SERVE_STAGE"):
        copy.open(ignore)
    assert not copy.target.exists()


def test_of_memory_half_may_be_used(copy, monkeypatch):
    monkeypatch.setattr(staging, "is_in_memory", lambda _: True)
    monkeypatch.setattr(staging, "available_memory", lambda: 6 * MIB)
    with pytest.raises(DoesNotFitError, match="which is memory, and 6 MiB of it are free for this job; at most half"):
        copy.open(ignore)
    monkeypatch.setattr(staging, "available_memory", lambda: 16 * MIB)
    copy.open(ignore)


def test_a_file_that_is_damaged_is_not_loaded(model, environ):
    (model / "a.safetensors").unlink()
    (model / "a.safetensors").write_bytes(safetensors(bytes(100))[:-10])
    copy = planned(model, environ)
    with pytest.raises(InvalidRequestError, match=r"is not what was read: a\.safetensors has"):
        copy.open(ignore)
    assert not copy.target.exists()


def test_a_file_that_becomes_shorter_meanwhile_is_an_error(copy, model):
    (model / "a.safetensors").resolve().write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="has become shorter"):
        copy.open(ignore)
    assert not copy.target.exists()


# -- what is copied, and which command loads the copy


def test_the_engine_loads_the_copy_and_answers_to_the_models_names(copy, model, environ):
    def loads(copy, command) -> str:
        return " ".join(copy.command(command).argv)

    asked, named = command(model, "--max-num-seqs", "4"), command(model, "--served-model-name", "mine")
    assert loads(copy, asked) == f"vllm serve {copy.target} --max-num-seqs 4 --served-model-name {model}"
    assert loads(copy, named) == f"vllm serve {copy.target} --served-model-name mine"
    stand_in = read_command(["vllm", "serve", "org/model"], stand_in=StandIn(folder=str(model)))
    found = plan_staging(stand_in, stage_base(environ), environ)
    assert loads(found, stand_in) == f"vllm serve {found.target} --served-model-name org/model"


@pytest.mark.parametrize("text", ["", "off", "0"])
def test_without_the_variable_nothing_is_copied(text):
    assert stage_base({"HPC_SERVE_STAGE": text}) is None


def test_on_is_the_folder_of_temporary_files(model, environ, tmp_path):
    found = planned(model, environ | {"HPC_SERVE_STAGE": "on", "HPC_SERVE_TMPDIR": str(tmp_path)})
    assert found.target.parents[1] == tmp_path
    with pytest.raises(InvalidRequestError, match="must be on, off, or a folder"):
        planned(model, {"HPC_SERVE_STAGE": "scratch"})


def test_a_model_that_is_not_here_must_be_fetched_first(environ, tmp_path):
    with pytest.raises(InvalidRequestError, match="`hpc-serve fetch org/model` first"):
        planned("org/model", environ)


def test_a_model_of_the_cache_is_found(model, environ, tmp_path):
    snapshot = cached(tmp_path / "hf" / "hub", "org/model", {})
    shutil.copytree(model, snapshot, dirs_exist_ok=True)
    assert planned("org/model", environ).source == snapshot


@pytest.mark.parametrize("name", ["../outside.safetensors", "{tmp_path}/outside.safetensors"])
def test_files_that_an_index_names_outside_of_the_model_are_not_of_it(model, environ, tmp_path, name):
    (tmp_path / "outside.safetensors").write_bytes(safetensors(b"mine"))
    weights = {"a": name.format(tmp_path=tmp_path), "b": "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert missing_weights(model).files == (weights["a"],)
    assert [path.name for path in weight_files(model)] == ["b.safetensors"]
    assert "a.safetensors" not in {file.path for file in planned(model, environ).files}


def test_a_file_of_the_model_does_not_say_that_its_copy_is_whole(model, environ):
    (model / "ready").write_text("yes")
    assert "ready" not in {file.path for file in planned(model, environ).files}
