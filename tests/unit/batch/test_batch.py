"""A batch answers each line once, however its runs end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from hpc_serve import batch
from hpc_serve.batch.answer_files import AnswerFile
from hpc_serve.batch.request_file import IdIndex
from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError
from tests.support.patience import wait_until
from tests.unit.batch.conftest import request_line


def run(requests: Path, output: Path, **options) -> list[batch.Answer]:
    async def collect() -> list[batch.Answer]:
        return [answer async for answer in batch.run(requests, output, service="405b", **options)]

    return asyncio.run(collect())


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"], ids=ascii)
def test_each_line_is_answered_once_and_a_second_run_asks_nothing(serving, requests, end, output, errors):
    asked = requests([request_line(f"q{n}") for n in range(20)], end)
    asked.write_bytes(asked.read_bytes().removesuffix(end.encode()))  # nor must the last line have an end
    answers = run(asked, output)
    assert answers[-1].progress.answered == 20
    assert answers[-1].progress.left == 0
    assert sorted(ids(output)) == sorted(f"q{n}" for n in range(20))
    first = json.loads(output.read_text().splitlines()[0])
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"]
    assert first["error"] is None
    assert not errors.exists()
    assert run(asked, output) == []


def test_all_routes_of_the_stub_are_asked(serving, requests, output):
    lines = [
        request_line("chat"),
        request_line("text", url="/v1/completions", body={"prompt": "Hello"}),
        request_line("vector", url="/v1/embeddings", body={"input": "Hello"}),
    ]
    found = {answer.custom_id: answer.body for answer in run(requests(lines), output)}
    assert found["text"]["choices"][0]["text"]
    assert found["vector"]["data"][0]["embedding"]
    assert found["chat"]["object"] == "chat.completion"


def test_a_refused_line_goes_to_the_errors_and_is_asked_again_on_request(serving, requests, tmp_path, output, errors):
    asked = requests([request_line("good"), request_line("long", "long " * 30_000)])
    run(asked, output)
    assert (ids(output), ids(errors)) == (["good"], ["long"])
    refused = json.loads(errors.read_text())
    assert refused["response"]["status_code"] == 400
    assert "maximum context length" in refused["error"]["message"]
    assert run(asked, output) == []
    assert [answer.custom_id for answer in run(asked, output, retry_errors=True)] == ["long"]
    assert (ids(errors), ids(tmp_path / "out.errors.jsonl.1")) == (["long"], ["long"])


def test_a_line_that_names_another_model_is_told_and_can_be_asked_all_the_same(serving, requests, tmp_path):
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "What?"}]}
    asked = requests([request_line("q", body=body)])
    (refused,) = run(asked, tmp_path / "a.jsonl")
    assert refused.status == 404
    assert "gpt-4o" in refused.error["message"]
    (answered,) = run(asked, tmp_path / "b.jsonl", any_model=True)
    assert answered.error is None


def test_if_the_first_hundred_lines_fail_the_rest_is_not_sent(serving, requests, output, errors):
    lines = [request_line(f"q{n}", body={"model": "other", "messages": []}) for n in range(150)]
    with pytest.raises(HpcServeError, match="The first 100 lines all failed"):
        run(requests(lines), output)
    assert len(ids(errors)) == 100


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"custom_id": "x", ', "it is no JSON"),
        ("[1]", "it is no JSON object"),
        (request_line("x", url="/v1/files"), "its url is"),
        (request_line("x", method="GET"), "its method is 'GET'"),
        (request_line("x", body={"stream": True}), "asks for a stream"),
        (request_line("x").replace('"x"', "7"), "its custom_id is 7"),
        (request_line("q2"), "lines 3 and 7 have the same custom_id, 'q2'"),
    ],
)
def test_a_bad_line_is_named_before_any_is_sent(requests, line, why, output):
    asked = requests([*(request_line(f"q{n}") for n in range(6)), line])
    with pytest.raises(InvalidRequestError, match=why) as raised:
        run(asked, output)
    assert "7" in str(raised.value)
    assert not output.exists()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_told_which_one_to_have(tmp_path, encoding, output):
    (tmp_path / "in.jsonl").write_text(request_line("größe").replace("\\u00f6", "ö") + "\n", encoding=encoding)
    with pytest.raises(InvalidRequestError, match="line 1: it is not in UTF-8"):
        run(tmp_path / "in.jsonl", output)


@pytest.mark.parametrize("size", [1, 19, 40, 200])
def test_a_last_line_that_was_not_written_to_its_end_is_cut_off(serving, requests, size, output):
    asked = requests(3)
    run(asked, output)
    whole = output.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    output.write_bytes(whole[: -len(last)] + last[:size])
    assert len(run(asked, output)) == 1
    assert sorted(ids(output)) == ["q0", "q1", "q2"]


@pytest.mark.parametrize("content", ["my notes", '{"id": 3}\n', "a\nb\n"])
def test_a_file_of_others_stays_as_it_is(requests, output, content):
    output.write_text(content)
    with pytest.raises(InvalidRequestError, match="is no answer of a batch"):
        run(requests(1), output)
    assert output.read_text() == content


def test_the_output_of_another_batch_is_refused(serving, requests, output):
    run(requests(3), output)
    with pytest.raises(InvalidRequestError, match=r"which .* does not ask"):
        run(requests([request_line("other")]), output)
    assert len(ids(output)) == 3


def test_files_that_cannot_be_are_refused_and_stay(requests, tmp_path, output):
    asked, pipe = requests(1), tmp_path / "pipe"
    os.mkfifo(pipe)
    for read, written, error, why in (
        (asked, asked, InvalidRequestError, "would be read and written"),
        (pipe, output, InvalidRequestError, "is no file: it is read twice"),
        (asked, Path("/dev/null"), InvalidRequestError, "/dev/null is no file"),
        (asked, tmp_path / "missing" / "out.jsonl", StoreError, "cannot be written"),
    ):
        with pytest.raises(error, match=why):
            run(read, written)
    assert Path("/dev/null").is_char_device()


def test_a_request_that_cannot_be_sent_is_an_error_of_its_line(serving, requests, output, errors):
    lines = [request_line("half", "a\ud800"), request_line("none", body={"messages": [], "top_p": float("nan")})]
    run(requests([*lines, request_line("whole")]), output)
    assert ids(output) == ["whole"]
    failed = [json.loads(line)["error"]["code"] for line in errors.read_text().splitlines()]
    assert failed == ["not_sent", "not_sent"]


def test_two_batches_on_one_output_are_told_apart(requests, output):
    first = AnswerFile(output)
    with pytest.raises(HpcServeError, match="Another batch is writing"):
        run(requests(1), output)
    first.close()


def test_another_writer_is_noticed_where_the_filesystem_has_no_locks(output):
    file = AnswerFile(output)
    file.append(b"one\n")
    with output.open("ab") as other:
        other.write(b"two\n")
    with pytest.raises(HpcServeError, match="was changed by another program"):
        file.append(b"three\n")
    file.close()
    assert output.read_bytes() == b"one\ntwo\n"


def test_an_id_that_is_answered_twice_is_told(serving, requests, output):
    asked = requests(2)
    run(asked, output)
    output.write_bytes(output.read_bytes() + output.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(InvalidRequestError, match=r"is answered in .*out\.jsonl and again in"):
        run(asked, output)


def test_a_job_that_runs_again_waits_for_the_lock_of_its_own_node_that_died(service, requests, output, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    service.start()
    first = AnswerFile(output)
    end = threading.Timer(0.5, first.close)
    end.start()
    assert len(run(requests(2), output)) == 2
    end.join()


def test_what_a_full_disk_holds_is_whole(output):
    code = (
        "import resource, signal, sys; from pathlib import Path; from hpc_serve.batch.answer_files import AnswerFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "file = AnswerFile(Path(sys.argv[1]))\n"
        'for n in range(100): file.append(b\'{"id": "batch_req_%d", "custom_id": "q", "response": null}\\n\' % n)\n'
    )
    ended = subprocess.run([sys.executable, "-c", code, output], capture_output=True, text=True, check=False)
    assert "cannot be written: File too large. What it holds is whole" in ended.stderr
    assert output.read_bytes().endswith(b"}\n")
    assert 900 < output.stat().st_size <= 1000


def test_in_order_the_output_follows_the_requests(serving, requests, output):
    asked = requests(50)
    run(asked, output)
    output.write_text("".join(reversed(output.read_text().splitlines(keepends=True))))
    run(asked, output, in_order=True)
    assert ids(output) == [f"q{n}" for n in range(50)]


def test_shards_are_joined_once_all_lines_are_there(serving, requests, output, errors):
    asked = requests([*(request_line(f"q{n}") for n in range(10)), request_line("bad", "x " * 60_000)])
    with pytest.raises(InvalidRequestError, match="There are no shards"):
        batch.merge(asked, output)
    for number in (1, 2):
        run(asked, output, shard=(number, 3))
    with pytest.raises(InvalidRequestError, match=r"3 of 11 lines have no answer yet.*--shard 3/3"):
        batch.merge(asked, output)
    last = run(asked, output, shard=(3, 3))[-1]
    assert (last.progress.total, last.progress.left) == (3, 0)
    assert batch.merge(asked, output) == (10, 1)
    assert ids(output) == [f"q{n}" for n in range(10)]
    assert ids(errors) == ["bad"]
    with pytest.raises(InvalidRequestError, match="is there already"):
        batch.merge(asked, output)


def test_killed_clients_and_engines_leave_each_id_once(service, requests, output):
    """The client is killed three times and an engine once, in the middle."""
    engines = [service.start("--stub-word-s", "0.005") for _ in range(2)]
    argv = [sys.executable, "-m", "hpc_serve.cli", "batch", requests(200), output, "--service", "405b"]

    def has_lines(count: int) -> bool:
        return output.exists() and output.read_bytes().count(b"\n") >= count

    for want in (40, 80, 120):
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        wait_until(partial(has_lines, want))
        if want == 80:
            engines[0].kill()
        assert process.poll() is None
        process.kill()
        process.wait()
    assert subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert sorted(ids(output)) == sorted(f"q{n}" for n in range(200))


def test_an_index_finds_what_is_in_it_and_nothing_else():
    index = IdIndex(f"q{n}" for n in range(5000))
    assert len({index.slot(f"q{n}") for n in range(5000)}) == len(index) == 5000
    assert index.slot("other") is None
    assert index.find_twins() is None
    assert IdIndex(["a", "b", "a"]).find_twins() == hash("a")
