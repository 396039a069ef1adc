"""`hpc-serve fetch` as people type it: a program of its own, a hub over HTTP; and its progress without a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_serve.cli.main import run
from hpc_serve.cli.setup.fetch import FetchProgress
from hpc_serve.units import GIB, MIB
from tests.support.patience import wait_until
from tests.unit.cli.conftest import stand_ins as stand_ins
from tests.unit.hub.conftest import MODEL

SHARD = "model-00002-of-00003.safetensors"
LONG_S = 120
# A shell that starts a program in the background may have it ignore SIGINT.
AS_TYPED = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from hpc_serve.cli.main import main; main(sys.argv[1:])"
)


@pytest.fixture
def at_the_hub(hub, stand_ins, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    return hub


def test_the_folder_is_on_stdout_and_the_rest_on_stderr(at_the_hub, tmp_path, ran):
    shown = ran(["fetch", MODEL])
    assert shown.out.startswith(str(tmp_path / "hf" / "hub" / "models--org--model" / "snapshots"))
    assert "org/model, commit aaaaaaaaaaaa: 6 files, 9 MiB. Left out: 3 files" in shown.err
    assert "9 MiB of 9 MiB (100 %)" in shown.err
    assert "all of it is here" in ran(["fetch", MODEL]).err


def test_jobs_look_where_the_site_says(at_the_hub, tmp_path, ran):
    site = tmp_path / "site.yaml"
    site.write_text(f"env: {{HF_HOME: {tmp_path}/scratch}}\n")
    assert ran(["fetch", MODEL, "--site", str(site)]).out.startswith(f"{tmp_path}/scratch/hub/")


def test_offline_says_what_the_cache_has(at_the_hub, monkeypatch, ran):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps from the hub, and" in ran(["fetch", MODEL], 2).err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert run(["fetch", MODEL]) == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shown = ran(["fetch", MODEL])
    assert "all of its weights are here, perhaps not the newest ones: HF_HUB_OFFLINE" in shown.err
    assert "snapshots" in shown.out


def test_a_hub_that_is_away_is_said(at_the_hub, ran):
    at_the_hub.status = 503
    assert "the hub answered HTTP 503, and " in ran(["fetch", MODEL], 1).err
    at_the_hub.status = 200
    assert run(["fetch", MODEL]) == 0
    at_the_hub.status = 503
    assert "all of its weights are here, perhaps not the newest ones" in ran(["fetch", MODEL]).err


@pytest.mark.parametrize(
    ("name", "words"),
    [("/nowhere", "is no model of the hub"), (".", "is a folder"), ("lama", "is no model of the hub")],
)
def test_what_is_no_model_of_the_hub(at_the_hub, name, words, ran):
    assert words in ran(["fetch", name], 2).err


def test_without_huggingface_hub_it_says_how_to_get_it(at_the_hub, monkeypatch, ran):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "`pip install huggingface_hub`" in ran(["fetch", MODEL], 2).err


def test_ctrl_c_keeps_whole_files_and_the_next_run_fetches_the_others(at_the_hub):
    at_the_hub.breaks[SHARD], at_the_hub.hold = [1_000_000], threading.Event()
    command = [sys.executable, "-c", AS_TYPED, "fetch", MODEL]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    cache = Path(os.environ["HF_HOME"]) / "hub" / "models--org--model"
    try:
        assert at_the_hub.broken.wait(LONG_S)
        wait_until(lambda: len(list(cache.glob("snapshots/*/*.safetensors"))) == 2)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=LONG_S)
    finally:
        program.kill()
    assert program.returncode == 130
    assert "Interrupted; 6 MiB of 9 MiB are here. The same command goes on from there." in said
    assert not list(cache.rglob("*.incomplete"))
    at_the_hub.hold.set()
    at_the_hub.ranges.clear()
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "6 MiB of it is here" in done.stderr
    assert [path for path, _ in at_the_hub.ranges] == [SHARD]


def lines(capsys, looks: list[tuple[float, int]], *, done: int = 0, total: int = 100) -> list[str]:
    """What is printed while a fetch has so many bytes at these times, in seconds."""
    times = [0.0]
    with FetchProgress(done, total, clock=lambda: times[0]) as progress:
        for times[0], here in looks:
            progress.show(here)
    return capsys.readouterr().err.splitlines()


def test_the_speed_is_that_of_the_last_seconds(capsys):
    fast = [(float(second), second * 100 * MIB) for second in range(1, 10)]
    slow = [(10.0 + second, (900 + second) * MIB) for second in range(20)]
    *_, last = lines(capsys, [*fast, *slow, (30.0, 1000 * MIB), (31.0, 1044 * MIB)], total=10 * GIB)
    assert last.startswith("1.0 GiB of 10.0 GiB (10 %), 13 MiB/s, about ")


def test_what_was_here_before_is_not_of_its_speed(capsys):
    (line,) = lines(capsys, [(1.0, 5 * GIB), (2.0, 5 * GIB), (3.0, 5 * GIB + GIB)], done=5 * GIB, total=10 * GIB)[-1:]
    assert line == "6.0 GiB of 10.0 GiB (60 %)"


def test_the_last_line_has_no_time_left(capsys):
    assert lines(capsys, [(1.0, MIB), (2.0, 2 * GIB)], total=2 * GIB)[-1] == "2.0 GiB of 2.0 GiB (100 %)"


def test_a_line_for_each_tenth_and_each_minute(capsys):
    done = [0, 5, 10, 11, 19, 20, 90, 100]
    shown = lines(capsys, [(float(at), here * MIB) for at, here in enumerate(done)], total=100 * MIB)
    assert [line.split("(")[1].split(" ")[0] for line in shown] == ["10", "20", "90", "100"]
    standing = [(at, MIB) for at in (1.0, 59.0, 60.0, 61.0, 119.0, 120.0)]
    assert len(lines(capsys, standing, total=100 * MIB)) == 2
