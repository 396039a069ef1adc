"""What the programs inside a job log: time, node and level stand before each message."""

from __future__ import annotations

import io
import logging
import re

import pytest

from hpc_serve.job.machine.allocation import print_line, set_up_logging
from hpc_serve.job.prepare import main


@pytest.mark.parametrize("node", ["n1", "100%d"])
def test_a_line_has_time_node_and_level(monkeypatch, node):
    monkeypatch.setenv("SLURMD_NODENAME", node)
    stream = io.StringIO()
    set_up_logging(stream)
    logging.getLogger("hpc_serve.job.head").info("%s is ready", "8b")
    logging.getLogger("hpc_serve.job.head").debug("nobody asked")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {node} INFO hpc-serve: 8b is ready\n", stream.getvalue())


def test_set_up_twice_each_line_is_written_once():
    first, second = io.StringIO(), io.StringIO()
    set_up_logging(first)
    set_up_logging(second)
    logging.getLogger("hpc_serve.job").error("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)


def test_a_childs_line_stays_as_it_is(capsys):
    print_line("(EngineCore pid=1) INFO 11-21 10:00:00 [core.py:1] init")
    assert capsys.readouterr().out == "(EngineCore pid=1) INFO 11-21 10:00:00 [core.py:1] init\n"


def test_what_the_script_evaluates_has_no_log_line_in_it(monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "HPC_SERVE_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    main(["--service", "8b"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.match(r"\S+ \S+ \S+ ERROR hpc-serve: ", printed.err)
