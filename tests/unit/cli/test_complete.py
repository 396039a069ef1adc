"""Words that a shell completes: as click is asked by it, and once by a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from click.shell_completion import ShellComplete

from hpc_serve.cli import complete
from hpc_serve.cli.main import COMMANDS, cli
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.patience import wait_until
from tests.support.stubs import make_record, make_submitted
from tests.unit.cli.test_main import HEAVY


@pytest.fixture
def store(store):
    for name in ("70b", "8b", "8b-test"):
        store.ensure_service(name)
    return store


def words(*before: str, incomplete: str = "") -> list[str]:
    shell = ShellComplete(cli, {}, "hpc-serve", "_HPC_SERVE_COMPLETE")
    return [item.value for item in shell.get_completions(list(before), incomplete)]


def test_services_are_completed(store):
    for command in ("status", "wait", "logs", "doctor", "stop", "forget", "scale", "wake", "report", "gateway"):
        assert words(command) == ["70b", "8b", "8b-test"]
        assert words(command, incomplete="8b-") == ["8b-test"]


@pytest.mark.parametrize("before", [["plan"], ["submit"], ["render", "--model"]])
def test_models_are_completed_by_their_short_names(before):
    assert {"8b", "70b", "405b"} <= set(words(*before))
    assert not any("/" in name for name in words(*before))
    assert words(*before, incomplete="meta-llama/Llama-3.3") == ["meta-llama/Llama-3.3-70B-Instruct"]


def test_the_site_s_own_models_are_completed_too(site):
    site("", "- name: group-70b\n  model: 70b\n")
    assert words("submit", incomplete="group") == ["group-70b"]
    assert "8b" in words("submit")
    site("", "no list\n")
    assert "8b" in words("submit")


def test_commands_and_options_are_completed_without_importing_them():
    assert words() == list(COMMANDS)
    assert words(incomplete="ta") == ["targets"]
    assert "--watch" in words("targets", incomplete="--w")


def test_a_home_that_hangs_or_is_not_trusted_gives_no_names(store, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(complete, "_LIST_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(ServiceStore, "services", lambda self: [str(held.wait(60))])
        assert words("status") == []
    held.set()
    (store.home / "services").chmod(0o777)
    assert words("status") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(shell, ran):
    assert f"_HPC_SERVE_COMPLETE={shell}_complete" in ran(["completion", shell]).out


def test_bash_completes_with_it(store, tmp_path):
    program = tmp_path / "bin" / "hpc-serve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpc_serve.cli "$@"\n')
    program.chmod(0o755)
    script = (
        "source <(hpc-serve completion bash); COMP_WORDS=(hpc-serve status 8b-); COMP_CWORD=2; "
        '_hpc_serve_completion hpc-serve; echo "${COMPREPLY[@]}"'
    )
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}

    def completed() -> str:
        done = subprocess.run([shutil.which("bash"), "-c", script], env=environ, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.strip()

    wait_until(lambda: completed() == "8b-test")  # on a busy machine no name may come in time


def test_completing_imports_nothing_heavy(store):
    code = (
        "import sys\nfrom hpc_serve.cli import complete\ncomplete._LIST_S = 60\n"
        "from click.shell_completion import ShellComplete\nfrom hpc_serve.cli.main import cli\n"
        "shell = ShellComplete(cli, {}, 'hpc-serve', 'X')\n"
        "print([item.value for item in shell.get_completions(['status'], '')], sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['70b', '8b', '8b-test']")
    assert [name for name in HEAVY if f"'{name}'" in done.stdout] == []


def test_a_service_that_is_over_is_not_offered_where_it_can_only_be_asked(store):
    store.write(make_record(service="8b", job_id="1", state="ready", updated_at=time.time()))
    store.write(make_record(service="70b", job_id="2", state="stopped", updated_at=time.time()))
    store.write(make_record(service="8b-test", job_id="3", state="ready", updated_at=time.time() - 86400))
    store.ensure_service("waits")
    store.write_submitted(make_submitted(service="waits", job_id="4"))
    for command in ("chat", "env", "top", "targets", "bench"):
        assert words(command) == ["8b", "waits"]
    assert words("logs") == ["70b", "8b", "8b-test", "waits"]


def test_accelerators_are_completed():
    for command in ("plan", "submit", "bench"):
        assert "mi300x" in words(command, "--gpu")
    assert words("plan", "--gpu", incomplete="h100-8") == ["h100-80gb"]
    assert "v5e:4x4" in words("plan", "--gpu", incomplete="v5e:")
