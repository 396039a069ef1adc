"""What tests share: the multi-host Slurm of tests/cluster, its users' environment, the tiny models, and shown tables.

The cluster is brought up by the first test that asks for it, under a name of this session, and must be quiet at the end
before it goes. HPC_SERVE_KEEP_CLUSTER=1 keeps one called `test` for the next session and for a look around.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpc_serve.demo_model import SHAPES, make_demo_model
from tests.cluster import ClusterConfig, ClusterError, SlurmCluster, wait_for
from tests.cluster.config import CHECKOUT
from tests.cluster.environment import user_environment, visible_folders
from tests.cluster.leftovers import remove_leftovers, session_name

KEEP = os.environ.get("HPC_SERVE_KEEP_CLUSTER") == "1"
COVERED = "COVERED_CHECKOUT"
TABLE = "table"
STUB_ENGINE = CHECKOUT / "tests" / "support" / "stub_engine.py"

T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-cluster", action="store_true", help="fail, not skip, where the cluster cannot be")
    parser.addoption("--long", action="store_true", help="the wide sweeps alone, with all cases (make test-long)")
    parser.addoption("--first-cases", action="store_true", help="of each parametrised test its first case alone")


def pytest_configure(config: pytest.Config) -> None:
    """The folder for counts of lines (tests/support/count_lines.py) is open to the cluster's users, as /tmp is."""
    if COVERED in os.environ and config.pluginmanager.hasplugin("_cov"):
        folder = Path(os.environ[COVERED]) / ".coverage"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --long keep the sweeps alone; with --first-cases one case of each test."""
    kept = items
    if config.getoption("--long"):
        kept = [item for item in kept if "thinned" in getattr(item, "fixturenames", ())]
    if config.getoption("--first-cases"):
        kept = list({item.nodeid.partition("[")[0]: item for item in reversed(kept)}.values())[::-1]
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = kept


@pytest.fixture(scope="session")
def thinned(request: pytest.FixtureRequest) -> Callable[[Iterable[T]], list[T]]:
    """Take every sixth case of a wide sweep; with --long all cases."""
    step = 1 if request.config.getoption("--long") else 6
    return lambda cases: list(cases)[::step]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist=loadscope, tests are shared out by what they need; else as pytest-xdist does by itself."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.support.two_processes import TwoProcesses

    return TwoProcesses(config, log)


@pytest.fixture
def show_table(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Show a table at the end of the run, whichever process the test is in."""
    return lambda table: record_property(TABLE, table)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in list(terminalreporter.stats.values()):
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == TABLE and report.when == "call":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A real Slurm of three hosts with eight declared GPUs each, and a login host."""
    if os.geteuid() == 0:
        remove_leftovers()
    name = "test" if KEEP else session_name()
    cluster = SlurmCluster(ClusterConfig(name=name, visible=visible_folders()))
    try:
        cluster.up()
    except ClusterError as error:
        if request.config.getoption("--require-cluster"):
            raise
        pytest.skip(f"{error}; `make test` has all of it")
    unreadable = cluster.run([sys.executable, "-c", "import hpc_serve"]).stderr
    assert not unreadable, f"ordinary users cannot run what is in {CHECKOUT}: {unreadable}(try chmod -R go+rX)"
    yield cluster
    if KEEP:
        return
    try:
        wait_for(lambda: not cluster.processes(), 180, what="the users' processes to end by themselves")
    finally:
        cluster.down()
    assert not cluster.config.state.exists()


@pytest.fixture(scope="session")
def alice_env(cluster: SlurmCluster) -> dict[str, str]:
    """What a user needs in the environment: this session's Python, and vLLM on few cores."""
    counting = {COVERED: os.environ[COVERED]} if COVERED in os.environ else {}
    return {**user_environment(), **counting}


@pytest.fixture(scope="session")
def stub_env(cluster) -> dict[str, str]:
    """What makes scripts find the stub (tests/support/stub_engine.py) in place of `vllm`."""
    folder = cluster.home("alice") / "stub-env" / "bin"
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f"export PATH={folder}:{sys.prefix}/bin:$PATH\n")
    (folder / "vllm").write_text(f'#!/bin/bash\nexec {sys.executable} {STUB_ENGINE} "$@"\n')
    (folder / "vllm").chmod(0o755)
    return {"HPC_SERVE_ENV": str(folder.parent)}


@pytest.fixture(scope="session")
def tiny_models(cluster: SlurmCluster) -> Path:
    """A folder that every user reads, with one tiny model each like 405b, 70b and 8b."""
    folder = cluster.shared / "models"
    for like in SHAPES:
        make_demo_model(folder / like, like=like)
    return folder
