"""Out of many lines of many nodes, the first cause: the root of what followed, the first in time, said once."""

from __future__ import annotations

import pytest

from hpc_serve.diagnose.causes import find_causes, first_cause
from tests.unit.diagnose.cases_of_logs import cause_in, read_cases
from tests.unit.diagnose.test_rules import evidence

DEAD = "(APIServer pid=1) ERROR 11-20 10:00:09 [async_llm.py:700] EngineDeadError: EngineCore encountered an issue."
OOM = (
    "(Worker_TP3 pid=9) ERROR 11-20 {time} [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 2 GiB"
)
TIMEOUT = (
    "[rank0]:[E1120 {time}.123456789 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600059 milliseconds "
    "before timing out."
)


FOLLOWS = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


def traceback(words, *, file="vllm/a.py", line=1, function="f", head=""):
    """The lines of an exception as Python prints it."""
    return [
        f"{head}Traceback (most recent call last):",
        f'{head}  File "/e/lib/python3.11/site-packages/{file}", line {line}, in {function}',
        f"{head}    g()",
        f"{head}{words}",
    ]


def cause_of(*lines):
    return first_cause([evidence(lines)]).cause


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "(EngineCore pid=1) ERROR 11-20 [core.py:9] ValueError: No available memory for the cache blocks.",
            "the weights leave no memory for a KV cache on a GPU "
            "(ValueError: No available memory for the cache blocks.)",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "a GPU ran out of memory (torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB)",
        ),
        ("2026-11-21 02:36:08,7\tERR scripts.py:1300 -- raylet [exit code=-9]", "Ray's raylet ended with -9"),
        ("TypeError: WARNING is no level", "TypeError: WARNING is no level"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
        ("INFO errors: none", None),
        ("WARNING 11-21 22:40:11 [import_utils.py:9] Exception: no module named deep_gemm, using another kernel", None),
        ("(Worker pid=9) WARNING 11-21 22:40:11 [x.py:9] RuntimeError: the cache could not be read", None),
        ("2026-11-21 02:30:20,123\tWARNING utils.py:12 -- ConnectionError: will retry", None),
        ("WARNING:root:ValueError: ignored", None),
        (
            "[2026-11-21 02:30:20,1 E 9 9] core_worker_process.cc:841: RpcError: Running out of retries. rpc_code: 14",
            None,
        ),
    ],
)
def test_what_one_line_tells(line, sentence):
    found = first_cause([evidence([line])])
    assert (found and found.sentence.partition(" (raylet")[0]) == sentence


def test_a_warnings_exception_is_not_the_cause_and_an_error_70_lines_later_is():
    lines = [
        "(Worker pid=9) WARNING 11-21 22:40:11 [import_utils.py:9] Exception: no module named deep_gemm",
        *[f"(Worker pid=9) INFO 11-21 22:40:12 [x.py:9] step {step}" for step in range(70)],
        *traceback(
            "TypeError: unhashable type: 'list'",
            file="m/llama.py",
            line=7,
            function="load",
            head="(Worker pid=9) ERROR 11-21 22:41:30 [x.py:9] ",
        ),
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    (found,) = find_causes([evidence(lines)])
    assert found.cause == "TypeError: unhashable type: 'list', in load, m/llama.py:7"
    assert [line.place for line in found.lines] == ["n1.log:75", "n1.log:73"]
    assert not found.is_known


@pytest.mark.parametrize(
    "process", ["VllmWorker-0 pid=9", "Worker_TP1 pid=9", "ServeReplica:llm:app pid=9, ip=10.0.0.2"]
)
def test_the_process_that_failed_first_has_the_cause_whatever_it_is_called(process):
    first = f"({process}) ERROR 11-23 15:56:38 [a.py:9] "
    then = "(EngineCore pid=8) ERROR 11-23 15:56:42 [core.py:1510] "
    lines = [
        *traceback("TypeError: unhashable type: 'list'", file="m/llama.py", line=7, head=first),
        *traceback("Exception: Nothing runs. See stack trace above.", file="m/core.py", head=then),
    ]
    assert cause_of(*lines) == "TypeError: unhashable type: 'list', in f, m/llama.py:7"


def test_the_memory_of_one_rank_is_the_cause_and_not_the_timeout_of_those_that_waited_for_it():
    first = evidence([TIMEOUT.format(time="10:10:05"), DEAD], "node0.log")
    other = evidence([OOM.format(time="10:00:03")], "node1.log")
    found, *others = find_causes([first, other])
    assert (found.name, found.lines[0].place) == ("gpu-out-of-memory", "node1.log:1")
    assert [one.name for one in others] == ["nccl-timeout"]


def test_the_first_in_time_counts_on_whichever_node():
    late = evidence(["ERROR 11-20 10:05:00 [a.py:1] OSError: [Errno 28] No space left on device"], "node0.log")
    early = evidence([OOM.format(time="10:04:59")], "node1.log")
    assert [one.name for one in find_causes([late, early])] == ["gpu-out-of-memory", "disk-full"]


def test_ranks_that_say_the_same_are_one_finding_with_a_line_of_each():
    logs = [evidence([OOM.format(time=f"10:00:0{node}")] * 8, f"node{node}.log") for node in range(3)]
    (found,) = find_causes(logs)
    assert [line.source for line in found.lines] == ["node0.log", "node1.log", "node2.log"]
    lines = [
        f"(Worker_TP{rank} pid={rank}) ERROR 11-20 10:00:00 [a.py:1] ValueError: shard {rank} of 8" for rank in range(8)
    ]
    (found,) = find_causes([evidence(lines)])
    assert found.cause == "ValueError: shard 0 of 8"


@pytest.mark.parametrize(
    ("first", "link", "cause"),
    [
        ("ValueError: the root", FOLLOWS, "ValueError: the root, in f, vllm/a.py:1"),
        ("ValueError: the root", HANDLING, "ValueError: the root, in f, vllm/a.py:1"),
        # What code catches as a rule is not the root.
        ("KeyError: 'x'", HANDLING, "RuntimeError: what followed, in h, vllm/b.py:2"),
    ],
)
def test_the_root_of_a_chain_is_the_cause(first, link, cause):
    then = traceback("RuntimeError: what followed", file="vllm/b.py", line=2, function="h")
    assert cause_of(*traceback(first), "", link, "", *then) == cause


def test_a_line_of_source_in_a_traceback_is_no_message():
    lines = traceback("OverflowError: too many")
    lines[2] = '    raise RuntimeError("Every node should have a unique IP address") if nodes else error'
    assert [one.name for one in find_causes([evidence(lines)])] == ["unknown"]


def test_what_an_earlier_run_or_a_start_that_succeeded_said_is_forgotten():
    oom = OOM.format(time="09:00:00")
    for anew in (
        "INFO:     Application startup complete.",
        "2026-11-20 10:00:00 n1 INFO hpc-serve: launcher of 8b begins",
        "2026-11-20 10:00:00 n1 INFO hpc-serve: engine command: vllm serve x",
    ):
        assert find_causes([evidence([oom, anew, "all is well"])]) == ()
        assert cause_of(oom, anew, "ValueError: later") == "ValueError: later"


def test_a_consequence_alone_is_better_than_nothing():
    assert cause_of(DEAD) == "EngineDeadError: EngineCore encountered an issue."


def test_a_part_that_ended_without_a_word_shows_what_was_printed_last():
    lines = [
        "no such library",
        "2026-11-20 10:00:00 n2 ERROR hpc-serve: ray worker failed (exit code 9): ray worker exited with 9",
        "2026-11-20 10:00:00 n2 INFO hpc-serve: stopping",
    ]
    found = first_cause([evidence(lines, "node1.log")])
    assert found.cause == "ray worker exited with 9"
    assert [(line.place, line.text) for line in found.lines] == [
        ("node1.log:2", "ray worker exited with 9"),
        ("node1.log:1", "no such library"),
    ]


def test_a_sentence_of_a_record_tells_the_same_cause_again():
    for case in read_cases():
        found = first_cause([evidence(case.lines)])
        again = cause_in(f"engine exited with 1: {found.sentence}")
        assert again is not None, found.sentence
        assert again.name == found.name, found.sentence
    assert cause_in("engine exited with 1: TypeError: x") is None


def test_a_log_without_end_is_read_in_bounded_memory():
    log = evidence(
        f"(Worker pid={number}) ERROR 11-20 10:00:00 [a.py:1] ValueError: number {number}" for number in range(5_000)
    )
    assert len(log.raised) <= 300
    assert (log.raised[0].message, log.raised[-1].message) == ("number 0", "number 4999")


def test_an_error_of_a_request_long_before_the_end_is_not_the_cause_of_it():
    lines = [
        "(APIServer pid=1) ERROR 11-20 10:00:00 [serving.py:1] ValueError: this request is too long",
        *[f"(APIServer pid=1) INFO 11-20 1{1 + number // 60}:{number % 60:02}:00 [x.py:1] ok" for number in range(300)],
        "2026-11-20 16:00:00 n1 ERROR hpc-serve: engine failed (exit code 137): engine exited with 137",
    ]
    assert first_cause([evidence(lines)]).name == "killed"


def test_a_wait_that_is_over_is_no_symptom():
    wait = "INFO 11-20 10:00:40 [ray_utils.py:233] Waiting for creating a placement group of specs for 10 seconds."
    assert [one.name for one in find_causes([evidence([wait])])] == ["waits-for-placement"]
    later = [f"INFO 11-20 10:01:00 [x.py:1] loading {number}" for number in range(60)]
    assert find_causes([evidence([wait, *later])]) == ()


def test_an_error_of_the_script_or_of_the_launcher_itself_is_a_cause():
    for line in (
        "hpc-serve: /home/u/.venv belongs to another user, so nothing in it is run; set HPC_SERVE_ENV to use it",
        "2026-11-20 16:00:00 n1 ERROR hpc-serve: HPC_SERVE_STALL_S=x: it must be a number of seconds.",
    ):
        assert cause_of("hpc-serve: logs of this run are /l/7-node*.log", line) == line.partition("hpc-serve: ")[2]


def test_what_the_start_up_files_of_a_shell_complain_of_is_not_the_cause():
    batch = [
        "/etc/profile.d/x.sh: line 3: /var/log/x: Permission denied",
        "/home/u/.bashrc: line 9: conda: command not found",
    ]
    node = ["2026-11-20 10:05:00 n1 ERROR hpc-serve: node n2 failed (exit code 1): node n2 has sent nothing for 60 s"]
    assert first_cause([evidence(batch, "7.log"), evidence(node, "7-node0.log")]).name == "node-silent"
    assert [one.name for one in find_causes([evidence(batch, "7.log")])] == ["permission-denied"]


def test_a_part_of_ray_that_was_killed_comes_before_what_the_others_saw_of_it():
    worker = "2026-11-21 02:36:01,100 ERROR node.py:9 -- Unable to connect to GCS at 10.0.0.1:6379."
    head = "2026-11-21 02:36:08,791\tERR scripts.py:1300 -- gcs_server [exit code=-9]"
    found = find_causes([evidence([worker], "n2.log"), evidence([head], "n1.log")])
    assert [one.name for one in found] == ["ray-part-ended", "ray-unreachable"]
    assert found[0].cause == "Ray's gcs_server ended with -9"
