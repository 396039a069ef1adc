"""One client in several processes and in several event loops: each gets its own answers, over its own connections."""

import asyncio
import gc
import multiprocessing
import os
import ssl
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pydantic
import pytest

from hpc_serve.client import connect, connect_async
from tests.support.patience import wait_until
from tests.support.stub_engine import greedy_answer
from tests.unit.client.conftest import one_engine

CHECKOUT = Path(__file__).parents[3]
FORK = multiprocessing.get_context("fork")
WORDS = 20
STUB = ("--stub-greedy", "--stub-words", str(WORDS), "--stub-word-s", "0.002")


def check_own_answers(client, name, count=5):
    for number in range(count):
        prompt = f"{name} asks {number}"
        answer = client.completions.create(model="405b", prompt=prompt, temperature=0)
        assert answer.choices[0].text == greedy_answer(prompt, WORDS)
    stream = client.completions.create(model="405b", prompt=name, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == greedy_answer(name, WORDS)


async def check_own_answers_async(client, name, count=5):
    prompts = [f"{name} asks {number}" for number in range(count)]
    asked = [client.completions.create(model="405b", prompt=prompt, temperature=0) for prompt in prompts]
    for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
        assert answer.choices[0].text == greedy_answer(prompt, WORDS)


def run_children(target, count=30):
    """Run `target` in forks of this process; each must end well.

    A thread may hold the lock of coverage at a fork, and the child then waits for it for ever. Where lines are counted,
    the test runs again in a Python that counts none.
    """
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        run_test_without_coverage(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
        return
    children = [FORK.Process(target=target, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    deadline = time.monotonic() + 300
    for child in children:
        child.join(max(deadline - time.monotonic(), 0))
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0] * count


def run_test_without_coverage(test):
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--no-cov", test]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST_"))}
    done = subprocess.run(argv, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout


def test_a_fork_makes_and_frees_nothing_of_tls(service, monkeypatch):
    """OpenSSL has locks of its own, which a thread of the parent may hold."""
    _, client = one_engine(service, *STUB)
    check_own_answers(client, "parent")
    touched_in: list[int] = []

    class Context(ssl.SSLContext):
        def __new__(cls, *args, **options):
            touched_in.append(os.getpid())
            return super().__new__(cls, *args, **options)

    found = [each for each in gc.get_objects() if issubclass(type(each), ssl.SSLSocket | ssl.SSLContext)]
    assert any(type(each) is ssl.SSLSocket for each in found)
    watched = [weakref.ref(each, lambda _: touched_in.append(os.getpid())) for each in found]
    found.clear()
    monkeypatch.setattr(ssl, "SSLContext", Context)

    def check():
        assert os.getpid() not in touched_in
        assert any(each() is not None for each in watched)

    child = FORK.Process(target=check)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_children_of_a_process_whose_threads_are_asking(service):
    """A thread of the parent may hold any lock at the fork, but one inside of OpenSSL or of pydantic-core: those are
    taken for new connections and for the first answers of a process.
    """
    _, client = one_engine(service, *STUB)
    has_begun = threading.Barrier(7, timeout=60)
    enough = threading.Event()

    def load(name):
        check_own_answers(client, name, count=1)
        has_begun.wait()
        while not enough.is_set():
            check_own_answers(client, name, count=1)

    with ThreadPoolExecutor(6) as threads:
        loads = [threads.submit(load, f"thread {number}") for number in range(6)]
        try:
            has_begun.wait()
            run_children(lambda number: check_own_answers(client, f"child {number}", count=2))
        finally:
            enough.set()
        for each in loads:
            each.result(60)
    assert client._watch.pool._under_way == {}


def test_a_child_reads_its_first_answer_while_a_thread_of_the_parent_was_reading_one():
    """The SDK's classes are completed at the first answer, under a lock that the child inherits as it is."""
    lock = getattr(pydantic.main, "_rebuild_lock", None)
    if lock is None:
        pytest.skip(f"pydantic {pydantic.VERSION} completes classes without a lock")

    class Answer(pydantic.BaseModel, defer_build=True):
        text: str

    is_held, enough = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            enough.wait(60)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(hold)
        try:
            assert is_held.wait(60)
            child = FORK.Process(target=lambda: Answer(text="first"))
            child.start()
            child.join(20)
            code = child.exitcode
            child.kill()
        finally:
            enough.set()
    assert code == 0


def test_children_of_an_async_client_get_their_own_answers(service):
    service.start(*STUB)

    async def first():
        client = await connect_async("405b", max_retries=0)
        await check_own_answers_async(client, "parent")
        return client

    client = asyncio.run(first())
    run_children(lambda number: asyncio.run(check_own_answers_async(client, f"child {number}")), count=10)


def test_a_child_does_not_hold_its_parents_connections(service, work_log):
    """An engine aborts the request of a client that has left. It must see that, whatever children live."""
    _, client = one_engine(service, *STUB, *work_log.flags, "--stub-words", "100000", "--stub-word-s", "0.02")
    stream = client.completions.create(model="405b", prompt="x", stream=True)
    next(iter(stream))
    here, there = os.pipe()
    child = FORK.Process(target=os.read, args=(here, 1))
    child.start()
    stream.close()
    wait_until(lambda: work_log.count("abort"))
    os.write(there, b"x")
    child.join(60)
    assert child.exitcode == 0
    os.close(here)
    os.close(there)


def test_a_child_that_drops_an_answer_leaves_the_parents_alone(service):
    _, client = one_engine(service, *STUB)
    stream = client.completions.create(model="405b", prompt="x", temperature=0, stream=True)
    pieces = iter(stream)
    words = [next(pieces).choices[0].text]

    def drop(number):
        assert client._watch.pool._under_way == {}, "it is no request of the child's"
        stream.close()
        check_own_answers(client, f"child {number}", count=1)

    run_children(drop, count=2)
    words += [chunk.choices[0].text for chunk in pieces if chunk.choices]
    assert "".join(words) == greedy_answer("x", WORDS)


def test_an_async_client_is_used_in_one_loop_after_the_other(service):
    service.start(*STUB)
    client = asyncio.run(connect_async("405b", max_retries=0))
    for number in range(5):
        asyncio.run(check_own_answers_async(client, f"loop {number}"))
    transport: Any = client._client._transport
    assert len(transport._here._pools) == 1, "what belonged to loops that ended is forgotten"
    asyncio.run(client.close())


def test_an_async_client_is_used_in_several_loops_at_once(service):
    service.start(*STUB)
    client = asyncio.run(connect_async("405b", max_retries=0))
    with ThreadPoolExecutor(4) as threads:
        loops = [threads.submit(asyncio.run, check_own_answers_async(client, f"loop {number}")) for number in range(12)]
        for loop in loops:
            loop.result(60)


def test_connections_of_a_loop_that_ended_are_closed(service, work_log):
    """So that engines do not wait for a client that is gone."""
    service.start(*STUB, *work_log.flags, "--stub-words", "100000", "--stub-word-s", "0.02")

    async def leave_open():
        client = await connect_async("405b", max_retries=0)
        stream = await client.completions.create(model="405b", prompt="x", stream=True)
        await stream.__anext__()
        return client, stream

    loop = asyncio.new_event_loop()
    client, stream = loop.run_until_complete(leave_open())
    loop.close()
    assert not work_log.count("abort")
    asyncio.run(check_models(client))
    wait_until(lambda: work_log.count("abort"))
    assert stream.response.status_code == 200


def test_clients_that_are_not_closed_end_their_connections_without_a_warning(service, opened):
    service.start(*STUB)
    gc.collect()  # what other tests left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(10):
            check_own_answers(connect("405b"), f"client {number}", count=2)
        gc.collect()
    assert not [warning for warning in warned if warning.category is ResourceWarning]
    assert opened
    assert all(connection.is_lost for connection in opened)


def test_a_program_that_ends_says_nothing_of_its_threads_that_ask(service):
    service.start("--stub-words", "100000", "--stub-word-s", "0.02")  # a stream that cannot go on
    program = (
        "import atexit, threading, time; atexit.register(time.sleep, 0.5)\n"  # runs after whatever closes clients
        "from hpc_serve import connect; begun = threading.Event(); client = connect('405b')\n"
        "def ask():\n"
        "    for _ in client.completions.create(model='405b', prompt='x', stream=True): begun.set()\n"
        "for _ in range(4): threading.Thread(target=ask, daemon=True).start()\n"
        "begun.wait(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


async def check_models(client):
    assert (await client.models.list()).data
