"""What the kernel has killed for memory, as its counts say it, in both versions of cgroups; which end that explains."""

from __future__ import annotations

import os
import sys

import pytest

from hpc_serve.diagnose.causes import find_causes
from hpc_serve.diagnose.rules import RULES
from hpc_serve.job.machine import node_memory
from hpc_serve.job.machine.node_memory import OomCounts, OomWatch, read_counts
from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.run.parts import SIGKILL_RULES, SILENT_RULES, Parts, RunEnd
from hpc_serve.units import GIB, MIB
from tests.unit.diagnose.cases_of_logs import cause_in, read_cases
from tests.unit.diagnose.test_rules import evidence

MARK = f"test-{os.getpid()}-oom"
ENVIRON = {**os.environ, **mark_environ(MARK)}


def machine(tmp_path, cgroup, files, *, vmstat="oom_kill 7\n"):
    """A made-up /proc and /sys/fs/cgroup."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    of_proc = {"self/cgroup": cgroup, "vmstat": vmstat, "meminfo": f"MemTotal: {64 * GIB // 1024} kB\n"}
    for folder, texts in ((proc, of_proc), (root, files)):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return {"proc": proc, "root": root}


JOB_V2 = "system.slice/slurmstepd.scope/job_5"
TASK_V2 = f"{JOB_V2}/step_0/user/task_0"
STEP_V1 = "memory/slurm/uid_1000/job_5/step_0"
V2 = (
    f"0::/{TASK_V2}\n",
    {
        f"{TASK_V2}/memory.events": "low 0\nmax 9\noom 1\noom_kill 2\n",
        f"{TASK_V2}/memory.max": "max\n",
        f"{JOB_V2}/memory.events": "oom 9\noom_kill 30\n",
        f"{JOB_V2}/memory.max": f"{4 * GIB}\n",
        f"{JOB_V2}/memory.peak": f"{4 * GIB - MIB}\n",
    },
)
V1 = (
    "4:memory:/slurm/uid_1000/job_5/step_0\n1:name=systemd:/\n0::/\n",
    {
        f"{STEP_V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        f"{STEP_V1}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{STEP_V1}/memory.max_usage_in_bytes": f"{4 * GIB - MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.max_usage_in_bytes": f"{63 * GIB}\n",
    },
)


@pytest.mark.parametrize(("cgroup", "files"), [V2, V1], ids=["version 2", "version 1"])
def test_the_counts_of_both_versions_of_cgroups_are_read(tmp_path, cgroup, files):
    counts = read_counts(**machine(tmp_path, cgroup, files))
    assert counts == OomCounts(in_cgroup=2, on_node=7, limit_bytes=4 * GIB, most_bytes=4 * GIB - MIB)


def test_a_cgroup_without_a_limit_has_none_and_an_old_kernel_keeps_no_peak(tmp_path):
    no_limit = {name: text for name, text in V1[1].items() if name.startswith("memory/memory.")}
    assert read_counts(**machine(tmp_path / "a", V1[0], no_limit)) == OomCounts(on_node=7)
    no_peak = {name: text for name, text in V2[1].items() if "peak" not in name}
    no_peak[f"{JOB_V2}/memory.current"] = "4096\n"
    counts = read_counts(**machine(tmp_path / "b", V2[0], no_peak, vmstat="nr_free_pages 1\n"))
    assert counts == OomCounts(in_cgroup=2, limit_bytes=4 * GIB)


def test_a_machine_that_shows_nothing_says_nothing(tmp_path):
    assert read_counts(proc=tmp_path, root=tmp_path) == OomCounts()
    watch = OomWatch("n1", OomCounts)
    assert watch.words_of_end(by_sigkill=True, is_silent=True) == ""


def test_this_machine_can_be_read():
    assert read_counts().on_node is not None


def watch_of(*counts):
    """A watch on n1 that reads these counts, one after the other, and then the last for ever."""
    left = list(counts)
    return OomWatch("n1", lambda: left.pop(0) if len(left) > 1 else left[0])


BEFORE = OomCounts(in_cgroup=3, on_node=10, limit_bytes=4 * GIB, most_bytes=GIB)
KILLED = OomCounts(in_cgroup=5, on_node=12, limit_bytes=4 * GIB, most_bytes=4 * GIB)
OF_THIS_JOB = (
    "the kernel has killed 2 processes of this job on n1 for memory: its cgroup allows 4.0 GiB, and 4.0 GiB were used"
)
NONE_LEFT = "the kernel has killed 1 process of this job on n1 for memory: the node had none left"
ON_NODE = (
    "the kernel has killed 1 process on n1 for memory meanwhile: the node had none left, "
    "or another job reached its limit"
)
SIGKILL = "the kernel has killed none for memory on n1: another program or a person sent SIGKILL"
KILLED_OR_ENDED = (
    "the kernel has killed none for memory on n1: another program or a person killed it, unless it ended itself"
)


@pytest.mark.parametrize(
    ("after", "by_sigkill", "is_silent", "words", "rule"),
    [
        (KILLED, True, True, OF_THIS_JOB, "killed-for-memory"),
        (OomCounts(in_cgroup=4, on_node=11), False, False, NONE_LEFT, "killed-for-memory"),
        (OomCounts(in_cgroup=3, on_node=11), False, True, ON_NODE, "node-ran-out"),
        (OomCounts(in_cgroup=3, on_node=11), False, False, "", None),
        (BEFORE, True, True, SIGKILL, "killed-by-others"),
        (BEFORE, False, True, KILLED_OR_ENDED, "killed-by-others"),
        (BEFORE, False, False, "", None),
    ],
)
def test_what_an_end_was(after, by_sigkill, is_silent, words, rule):
    watch = watch_of(BEFORE, after)
    said = watch.words_of_end(by_sigkill=by_sigkill, is_silent=is_silent)
    assert said == words
    if rule:
        line = f"2026-11-22 10:00:00 n1 ERROR hpc-serve: engine failed (exit code 1): engine exited with 1; {said}"
        found = find_causes([evidence([line])])
        assert [one.name for one in found] == [rule]
        assert "n1" in found[0].cause


def test_a_kill_is_said_of_one_end_alone():
    watch = watch_of(BEFORE, KILLED)
    assert "2 processes" in watch.words_of_end(by_sigkill=True, is_silent=True)
    assert "killed none" in watch.words_of_end(by_sigkill=True, is_silent=True)


def test_what_was_killed_long_before_an_end_was_survived(monkeypatch):
    watch = watch_of(BEFORE, KILLED)
    watch.look()
    monkeypatch.setattr(node_memory, "_BELONGS_TO_END_S", -1.0)
    assert watch.words_of_end(by_sigkill=False, is_silent=False) == ""
    assert "killed none" in watch.words_of_end(by_sigkill=True, is_silent=True)


def test_kills_are_logged_when_they_are_seen(caplog):
    watch = watch_of(BEFORE, KILLED)
    with caplog.at_level("WARNING"):
        watch.look()
        watch.look()
    assert [record.message for record in caplog.records] == [OF_THIS_JOB]


def test_rules_of_silent_ends_exist():
    assert SIGKILL_RULES < SILENT_RULES <= {rule.name for rule in RULES}


async def reason_of(code):
    parts = Parts(MARK, RunEnd(), node_name="n1")
    child = await parts.start_child("engine", [sys.executable, "-c", code], ENVIRON)
    outcome = await parts.outcome_of(child)
    await parts.take_down()
    return outcome.reason


CORE_ENDED = "print('RuntimeError: Engine core initialization failed. Failed core proc(s): {\\'EngineCore\\': -9}'); "


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", SIGKILL),
        (f"{CORE_ENDED}raise SystemExit(1)", SIGKILL),
        ("print('ValueError: no'); raise SystemExit(1)", None),
    ],
)
async def test_an_end_by_sigkill_is_held_against_the_kernels_count(monkeypatch, code, words):
    monkeypatch.setattr(node_memory, "read_counts", lambda: OomCounts(in_cgroup=0, on_node=0))
    reason = await reason_of(code)
    assert reason.endswith(f"; {words}") if words else ";" not in reason


async def test_a_core_process_of_real_vllm_that_was_killed(tmp_path, monkeypatch):
    """Its server ends with 0, and says that it does not know why. The lines are those of a real one."""
    monkeypatch.setattr(node_memory, "read_counts", lambda: OomCounts(in_cgroup=0, on_node=0))
    (case,) = (case for case in read_cases() if case.rule == "engine-core-gone")
    log = tmp_path / "engine.log"
    log.write_text("\n".join(line for line in case.lines if "hpc-serve:" not in line))
    reason = await reason_of(f"print(open({str(log)!r}).read())")
    assert reason.startswith("engine exited with 0 before it was stopped: the engine's core process ended")
    assert reason.endswith(KILLED_OR_ENDED)
    found = cause_in(reason)
    assert found.name == "killed-by-others"
