"""What the batch script's one Python line makes: private, new at every attempt, and printable for the shell."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import stat
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hpc_serve.errors import InvalidRequestError, StoreError
from hpc_serve.job.cleanup.node_dir import read_control_port, write_control_port
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.job.prepare import choose_node_dir, main, prepare
from hpc_serve.rendezvous.claims import _FILELOCK
from hpc_serve.rendezvous.store import ServiceStore


@pytest.fixture
def run_main(environ, monkeypatch):
    """Runs the program in this environment, with `variables` of its own."""

    def run(**variables: str) -> int:
        for name, value in {**environ, **variables}.items():
            monkeypatch.setenv(name, value)
        return main(["--service", "8b"])

    return run


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_secrets_are_in_private_files_and_not_in_the_exports(environ):
    exports = prepare("8b", read_allocation(environ), environ)
    token, key = exports["RAY_AUTH_TOKEN_PATH"], exports["HPC_SERVE_API_KEY_FILE"]
    assert mode(token) == mode(key) == 0o600
    assert mode(Path(token).parent) == mode(Path(key).parent) == 0o700
    for secret in (Path(token).read_text(), Path(key).read_text().strip()):
        assert len(secret) >= 32
        assert not any(secret in value for value in exports.values())


def test_a_second_attempt_gets_another_folder_and_the_same_key(environ):
    one, two = (prepare("8b", read_allocation(environ), environ) for _ in range(2))
    assert one["HPC_SERVE_JOB_DIR"] != two["HPC_SERVE_JOB_DIR"]
    assert one["HPC_SERVE_NODE_TMP"] != two["HPC_SERVE_NODE_TMP"]
    assert one["HPC_SERVE_API_KEY_FILE"] == two["HPC_SERVE_API_KEY_FILE"]


def test_a_home_that_is_gone_is_made_by_the_first_run_of_a_job_alone(environ):
    home, first = Path(environ["HPC_SERVE_HOME"]), read_allocation(environ)
    again = replace(first, restart=1)
    with pytest.raises(StoreError, match=f"{home} is gone"):
        prepare("8b", again, environ)
    assert not home.exists()
    prepare("8b", first, environ)
    prepare("8b", again, environ)


def test_a_long_node_local_folder_is_refused_before_ray_trips_over_it():
    with pytest.raises(InvalidRequestError, match="HPC_SERVE_TMPDIR"):
        choose_node_dir("/" + "x" * 40)
    assert choose_node_dir("/tmp").startswith("/tmp/hs-")


def test_what_it_prints_is_quoted_for_the_shell(run_main, capsys, tmp_path):
    assert run_main(HPC_SERVE_LOG_DIR=str(tmp_path / "a'b c")) == 0
    assert "export HPC_SERVE_LOG_DIR=" in capsys.readouterr().out


def test_outside_a_job_it_fails_with_words(monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "HPC_SERVE_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--service", "8b"]) == InvalidRequestError.exit_code
    printed = capsys.readouterr()
    assert re.match(r"\S+ \S+ \S+ ERROR hpc-serve: .*submit a script", printed.err)
    assert printed.out == "", "what the script evaluates has no log line in it"


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("HPC_SERVE_TMPDIR", "/" + "x" * 40, "too long"),
        ("HPC_SERVE_LOG_DIR", "/proc/x", "cannot be made"),
        ("HPC_SERVE_LOG_DIR", "/tmp/%N-%j", "of Slurm's patterns"),
    ],
)
def test_a_run_that_cannot_begin_leaves_a_record_that_says_why(environ, run_main, variable, value, why):
    assert run_main(**{variable: value}) == 2
    (record,) = ServiceStore(Path(environ["HPC_SERVE_HOME"])).read("8b").records
    assert (record.state, record.failed_part, record.exit_code) == ("failed", "launcher", 2)
    assert why in record.reason
    assert not (Path(environ["HPC_SERVE_HOME"]) / "jobs").exists()


def test_the_head_tells_the_other_nodes_where_it_listens_in_a_file_that_prepare_has_made(environ):
    """A node that looks before the head has written sees no port; a file that is half written is none either."""
    run_dir = Path(prepare("8b", read_allocation(environ), environ)["HPC_SERVE_JOB_DIR"])
    (file,) = {path for path in run_dir.iterdir() if path.name != "ray_token"}
    assert (mode(file), read_control_port(run_dir)) == (0o600, None)
    made = file.stat().st_ino
    file.write_text("40")
    assert read_control_port(run_dir) is None
    write_control_port(run_dir, 40_001)
    assert (read_control_port(run_dir), file.stat().st_ino, mode(file)) == (40_001, made, 0o600)


def test_under_any_umask_everything_that_it_makes_is_the_users_alone(run_main, tmp_path):
    before = os.umask(0)
    try:
        assert run_main(HPC_SERVE_LOG_DIR=str(tmp_path / "a" / "b")) == 0
    finally:
        os.umask(before)
    made = [path for root in ("home", "a") for path in (tmp_path / root, *(tmp_path / root).rglob("*"))]
    assert [path for path in made if mode(path) & 0o077] == []
    assert any(path.name == "ray_token" for path in made)


@pytest.mark.parametrize(("is_there", "words"), [(True, "which is too old"), (False, "has no filelock")])
def test_a_filelock_that_is_missing_or_too_old_ends_the_job_before_it_has_launchers(
    environ, run_main, monkeypatch, capsys, is_there, words
):
    old: Any = types.ModuleType("filelock") if is_there else None
    monkeypatch.setitem(sys.modules, "filelock", old)
    if not is_there:
        missing = Mock(side_effect=importlib.metadata.PackageNotFoundError("filelock"))
        monkeypatch.setattr(importlib.metadata, "version", missing)
    assert run_main() == StoreError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "pip install 'filelock>=3.30'" in err
    (record,) = ServiceStore(Path(environ["HPC_SERVE_HOME"])).read("8b").records
    assert (record.state, record.failed_part) == ("failed", "launcher")
    assert words in (record.reason or "")


def test_what_is_asked_of_filelock_is_what_the_package_needs():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    assert _FILELOCK in setup["options"]["install_requires"].split()


def test_patterns_in_the_log_folder_are_expanded_as_slurm_does(environ, tmp_path):
    named = {"HPC_SERVE_LOG_DIR": str(tmp_path / "%x_%j" / "%a"), "SLURM_JOB_NAME": "my-name", "SLURM_JOB_ID": "77"}
    exports = prepare("8b", read_allocation({**environ, **named}), {**environ, **named})
    assert exports["HPC_SERVE_LOG_DIR"] == str(tmp_path / "my-name_77" / "4294967294")
    assert Path(exports["HPC_SERVE_LOG_DIR"]).is_dir()
