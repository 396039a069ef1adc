"""Keys of persons at a gateway: who is let in, for how long, how much, and what is counted."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import RecordError
from hpc_serve.gateway import personal_keys, request
from hpc_serve.gateway.personal_keys import AnswerCount, UnderWay, Use, add_person, expected_use, revoke_key
from tests.cluster import wait_for
from tests.support.stub_engine import chat_context, encode, greedy_answer
from tests.unit.gateway.conftest import Answer, Front

OWNERS = "k" * 32
WORDS = 12
GREEDY = ("--stub-greedy", "--stub-words", str(WORDS))
ANSWER = greedy_answer("Why?", WORDS)
PROMPT = len(encode("Why?"))
LOOK_S = request.LOOK_S
WHOLE = Use(requests=1, prompt_tokens=PROMPT, completion_tokens=WORDS)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch) -> None:
    monkeypatch.setattr(request, "LOOK_S", 0.05)


@pytest.fixture
def folder(service):
    return service.store.home / "gateway"


@pytest.fixture
def make(folder):
    """Makes a key for a person with some limits."""

    def key_of(name: str, *, max_in_flight: int | None = None, tokens_a_day: int | None = None) -> str:
        return add_person(folder, name, max_in_flight=max_in_flight, tokens_a_day=tokens_a_day)

    return key_of


def ask(front: Front, key: str | None, **fields):
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    body = {"model": "405b", "prompt": "Why?", "temperature": 0, **fields}
    return front.ask("POST", "/v1/completions", body, **headers)


def wait_for_status(front: Front, key: str, wanted: int, timeout_s: float = 60) -> None:
    wait_for(lambda: ask(front, key).status == wanted, timeout_s, what=f"HTTP {wanted}")


def counted(folder) -> dict[str, Use]:
    return personal_keys.read_use(folder, personal_keys.today())


def wait_for_use(folder, wanted: dict[str, Use]) -> None:
    wait_for(lambda: counted(folder) == wanted, 60, what=f"{wanted}")


# -- who is let in


def test_the_owners_key_and_each_persons_are_taken_and_no_other(service, gateway, make):
    service.start(*GREEDY)
    alice, bob = make("alice"), make("bob")
    front = gateway(key=OWNERS)
    for key in (OWNERS, alice, bob):
        assert ask(front, key).json["choices"][0]["text"] == ANSWER
    for wrong in (
        None,
        "",
        "x" * 43,
        alice[:-1],
        f"{alice}x",
        alice.swapcase(),
        personal_keys.hash_key(alice.encode()),
    ):
        answer = ask(front, wrong)
        assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert front.ask("GET", "/v1/models", X_Api_Key=alice).status == 200


def test_a_key_is_taken_and_refused_again_without_a_restart(service, gateway, make, folder, monkeypatch):
    monkeypatch.setattr(request, "LOOK_S", LOOK_S)
    service.start(*GREEDY)
    front = gateway(key=OWNERS)
    key = make("alice")
    wait_for_status(front, key, 200)
    connection = front.open()
    headers = {"Authorization": f"Bearer {key}"}

    def status() -> int:
        connection.request("GET", "/v1/models", headers=headers)
        with connection.getresponse() as response:
            response.read()
            return response.status

    assert status() == 200
    revoke_key(folder, "alice")
    wait_for(lambda: status() == 401, 5, what="the end of the key on a connection that stays open")
    assert ask(front, key).status == 401
    assert ask(front, OWNERS).status == 200
    connection.close()


def test_a_new_key_takes_the_place_of_a_revoked_one(make, folder):
    first = make("alice")
    revoke_key(folder, "alice")
    second = make("alice")
    assert [one.key_sha256 for one in personal_keys.read_people(folder)] == [personal_keys.hash_key(second.encode())]
    assert first != second


def test_a_file_that_others_can_change_is_refused(service, gateway, make, folder):
    service.start(*GREEDY)
    key = make("alice")
    front = gateway(key=OWNERS)
    assert ask(front, key).status == 200
    (folder / "keys.json").chmod(0o666)
    wait_for_status(front, key, 401)
    assert ask(front, OWNERS).status == 200
    with pytest.raises(RecordError, match="can be changed by everybody"):
        personal_keys.read_people(folder)


def _of_a_stranger(file: Path) -> None:
    os.chown(file, 64_999, 64_999)


def _a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere.json"))
    file.symlink_to("elsewhere.json")


def _a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _with_a_limit_in_words(file: Path) -> None:
    file.write_text(file.read_text().replace("null", '"many"', 1))


SPOILT_BY_OTHERS = [
    (_of_a_stranger, "belongs to user 64999"),
    (lambda file: file.chmod(0o662), "can be changed by everybody"),
]
DAMAGED = [
    (_a_link, "is a symbolic link"),
    (lambda file: file.write_text("{"), "is not JSON"),
    (lambda file: file.write_text(""), "is not JSON"),
    (lambda file: file.write_text("[]"), "holds a list"),
    (lambda file: file.write_text("{}"), "has no field people"),
    (lambda file: file.write_bytes(b"\xff" * 9), "is not text"),
    (lambda file: file.write_text(" " * (1 << 20) + "{}"), "is longer than"),
    (_with_a_limit_in_words, "max_in_flight is 'many'"),
    (_a_pipe, "is not a regular file"),
]


@pytest.mark.parametrize(("spoil", "says"), [*SPOILT_BY_OTHERS, *DAMAGED])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_spoilt_file_is_neither_believed_nor_written_over(make, folder, spoil, says):
    make("alice")
    file = folder / "keys.json"
    spoil(file)
    before = os.lstat(file)
    for use_it in (lambda: make("bob"), lambda: revoke_key(folder, "alice")):
        with pytest.raises(RecordError, match=says):
            use_it()
    assert os.lstat(file).st_ino == before.st_ino


@pytest.mark.parametrize(("spoil", "says"), DAMAGED)
def test_over_a_damaged_file_the_last_keys_hold_and_it_is_said_what_to_do(make, folder, spoil, says, capsys, caplog):
    revoked, alice = make("bob"), make("alice")
    running = request.People(folder)
    revoke_key(folder, "bob")
    running.look()
    spoil(folder / "keys.json")
    running.look()
    begun = request.People(folder)  # it knows no last keys
    taken = [[one.with_key(key.encode()) is not None for key in (alice, revoked)] for one in (running, begun)]
    assert taken == [[True, False], [False, False]]
    assert run(["key", "list"]) == 5
    for told in (capsys.readouterr().err, *(record.message for record in caplog.records)):
        words = " ".join(told.split())
        assert says in words
        assert "Gateways that run keep to the keys that they read last" in words
        assert "hpc-serve key add" in words
        assert "emove it" not in words  # that would end all keys: it is said as what it is
    assert len(caplog.records) == 2
    (folder / "keys.json").unlink()
    running.look()
    assert running.with_key(alice.encode()) is None


def test_a_gateway_that_starts_on_a_damaged_file_serves_its_owner(service, gateway, make, folder):
    service.start(*GREEDY)
    key = make("alice")
    text = (folder / "keys.json").read_text()
    (folder / "keys.json").write_text(text[:20])
    front = gateway(key=OWNERS)
    assert (ask(front, OWNERS).status, ask(front, key).status) == (200, 401)
    (folder / "keys.json").write_text(text)
    wait_for_status(front, key, 200)


def test_a_full_disk_keeps_the_keys_and_tells_of_none(make, folder, monkeypatch, capsys):
    make("alice")
    before = (folder / "keys.json").read_text()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpc_serve.rendezvous.files.os.fsync", full)
        for words in (("add", "bob"), ("revoke", "alice")):
            assert run(["key", *words]) == 5
            told = capsys.readouterr()
            assert told.out == ""
            assert "No space left" in told.err
    assert (folder / "keys.json").read_text() == before
    assert [path.name for path in folder.iterdir()] == ["keys.json"]


def test_a_limit_that_the_file_cannot_hold_is_refused_and_the_largest_is_kept(service, folder, capsys):
    for number, code in ((2**63 - 1, 0), (2**63, 2), (10**30, 2)):
        words = ("--tokens-a-day", str(number), "--max-in-flight", str(number))
        assert run(["key", "add", f"of-{number}", *words]) == code
    capsys.readouterr()
    (alone,) = personal_keys.read_people(folder)
    assert (alone.max_in_flight, alone.tokens_a_day) == (2**63 - 1, 2**63 - 1)


def test_a_gateway_does_not_start_on_a_file_that_others_can_change(make, folder, refused):
    make("alice")
    (folder / "keys.json").chmod(0o622)
    code, told = refused("--port", "0")
    assert code == 5
    assert "can be changed by" in told


def test_a_gateway_that_asks_for_no_key_knows_no_persons(service, gateway, make, folder):
    service.start(*GREEDY)
    front = gateway()
    assert ask(front, make("alice", tokens_a_day=1)).status == 200
    assert ask(front, "whatever").status == 200


# -- limits


def test_so_many_requests_are_under_way_and_no_more(service, gateway, make, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    service.start(*GREEDY, "--stub-hang-file", str(hang))
    key, other = make("alice", max_in_flight=1), make("bob")
    front = gateway(key=OWNERS)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(front, key).status)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) == 2, 60, what="the refusals")
    answer = ask(front, key)
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "person_in_flight", "1")
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert "alice has 1 requests under way" in answer.json["error"]["message"]
    hang.unlink()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == [200, 429, 429]
    assert ask(front, key).status == ask(front, other).status == 200


def test_over_the_tokens_of_a_day_a_person_waits_for_the_next(service, gateway, make, monkeypatch):
    service.start(*GREEDY)
    key, other = make("alice", tokens_a_day=PROMPT + WORDS + 1), make("bob")
    front = gateway(key=OWNERS)
    assert [ask(front, key).status for _ in range(2)] == [200, 200]  # the second began below the limit
    answer = ask(front, key)
    assert (answer.status, answer.code) == (429, "person_tokens")
    assert f"alice has used {2 * (PROMPT + WORDS):,} tokens today" in answer.json["error"]["message"]
    assert 0 < int(answer.headers["retry-after"]) <= 25 * 3600
    assert ask(front, other).status == ask(front, OWNERS).status == 200
    monkeypatch.setattr(personal_keys, "today", lambda: "2999-01-01")
    assert ask(front, key).status == 200


def test_requests_under_way_count_for_the_tokens_of_a_day(service, gateway, make, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    service.start(*GREEDY, "--stub-hang-file", str(hang))
    key = make("alice", tokens_a_day=200)
    front = gateway(key=OWNERS)
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(front, key, max_tokens=100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) == 6, 60, what="the refusals")  # two hold more than 200 with their prompts
    for answer in answers:
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "person_tokens", "1")
        assert "Requests under way may use the rest" in answer.json["error"]["message"]
    hang.unlink()
    for thread in threads:
        thread.join(60)
    assert sorted(answer.status for answer in answers) == [200, 200, *[429] * 6]
    assert ask(front, key, max_tokens=5000).status == 200  # much, but nothing is under way


def test_what_comes_beyond_the_expected_is_under_way_until_the_end():
    under_way = UnderWay()
    count = AnswerCount(under_way, Use(prompt_tokens=4, completion_tokens=2))
    count.begin(is_stream=True)
    for number in range(5):
        count.feed(b'data: {"choices":[{"text":"a"}]}\n\n')
        assert under_way == UnderWay(requests=1, tokens=max(6, 5 + number))
    count.end()
    assert under_way == UnderWay()


@pytest.mark.parametrize(
    ("route", "fields", "wanted"),
    [
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6 * 16),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 16),
        ("/v1/chat/completions", {}, 4096),
        ("/v1/chat/completions", {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ("/v1/responses", {"max_output_tokens": 5}, 5),
        ("/v1/embeddings", {}, 0),
        ("/v1/chat/completions", {"max_tokens": "many", "n": None, "prompt": []}, 4096),
        ("/v1/chat/completions", {"max_tokens": -5, "n": -1}, 5),
        ("/v1/chat/completions", {"max_tokens": 10**400}, 10**9),
    ],
)
def test_what_a_request_may_use_is_read_from_its_bounds(route, fields, wanted):
    assert expected_use(route, "application/json", b"x" * 40, fields) == Use(prompt_tokens=10, completion_tokens=wanted)


def test_bytes_of_images_and_sound_are_not_counted_as_text():
    image = b'{"url": "data:image/png;base64,' + b"A" * 100_000
    for kind, body in (("application/json", image), ("multipart/form-data; boundary=x", b"A" * 100_000)):
        assert expected_use("/v1/embeddings", kind, body, {}).tokens == 4096


def test_the_limit_of_a_day_counts_what_other_gateways_and_earlier_ones_answered(service, gateway, make, folder):
    service.start(*GREEDY)
    key = make("alice", tokens_a_day=10**9)
    one, two = gateway(key=OWNERS), gateway(key=OWNERS)
    assert ask(one, key).status == ask(two, key).status == 200
    wait_for_use(folder, {"alice": WHOLE + WHOLE})
    personal_keys.write_use(
        folder / personal_keys.file_name(personal_keys.today(), "third"),
        {"alice": Use(requests=1, prompt_tokens=10**9)},
    )
    for front in (one, two, gateway(key=OWNERS)):
        wait_for_status(front, key, 429)


# -- counts


def test_whole_answers_and_streams_are_counted_for_persons_alone(service, gateway, make, folder):
    service.start(*GREEDY)
    alice, bob, carol = make("alice"), make("bob"), make("carol")
    front = gateway(key=OWNERS)
    assert ask(front, alice).status == ask(front, OWNERS).status == 200
    streamed = ask(front, bob, stream=True, stream_options={"include_usage": True})
    assert streamed.body.count(b'"usage": {') == 1
    assert b'"usage"' not in ask(front, carol, stream=True).body
    assert ask(front, carol, max_tokens=-1).status == 400
    wait_for_use(
        folder,
        {"alice": WHOLE, "bob": WHOLE, "carol": Use(requests=2, prompt_tokens=PROMPT, completion_tokens=WORDS)},
    )
    assert not {b"alice", b"bob", b"carol"} & set(front.ask("GET", "/metrics", X_Api_Key=OWNERS).body.split(b'"'))


def test_requests_at_once_share_the_time_of_the_gpus(service, gateway, make, folder):
    seconds, gpus = 1.0, 8
    service.start("--stub-words", "2", "--stub-word-s", str(seconds / 2), gpus_per_node=gpus)
    alice, bob = make("alice"), make("bob")
    front = gateway(key=OWNERS)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, front, key) for key in (alice, alice, bob)]
    assert [one.result().status for one in asked] == [200] * 3

    def used() -> dict[str, float]:
        return {name: one.gpu_seconds for name, one in personal_keys.read_use(folder, personal_keys.today()).items()}

    def requests() -> int:
        return sum(one.requests for one in personal_keys.read_use(folder, personal_keys.today()).values())

    wait_for(lambda: requests() == 3, 60, what="the use of all three")
    # The three shares are a third, a half and all of the time, as requests end one after the other.
    assert gpus * seconds * 3 / 3 <= sum(used().values()) < gpus * 60
    assert used()["bob"] >= gpus * seconds / 3


def test_a_stream_without_usage_counts_its_token_ids_or_the_events_that_carry_text(service, gateway, make, folder):
    service.start(*GREEDY)
    alice, bob = make("alice"), make("bob")
    front = gateway(key=OWNERS)
    messages = [{"role": "user", "content": "Why?"}]
    body = {"model": "405b", "messages": messages, "temperature": 0, "stream": True}
    assert front.ask("POST", "/v1/chat/completions", body, X_Api_Key=alice).status == 200
    body |= {"tools": [{"type": "function", "function": {"name": "look"}}]}  # of such a stream no ids are asked for
    answer = front.ask("POST", "/v1/chat/completions", body, X_Api_Key=bob)
    assert (answer.status, b"token_ids" in answer.body) == (200, False)
    prompt, estimate = len(encode(chat_context(messages))), len(json.dumps(body)) // 4
    wait_for_use(
        folder,
        {
            "alice": Use(requests=1, prompt_tokens=prompt, completion_tokens=WORDS),
            "bob": Use(requests=1, prompt_tokens=estimate, completion_tokens=WORDS),
        },
    )


def test_what_a_stream_has_sent_counts_when_its_reader_leaves(service, gateway, make, folder, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    service.start(*GREEDY, "--stub-hang-file", str(hang), "--stub-hang-after", "3")
    key = make("alice", max_in_flight=1)
    front = gateway(key=OWNERS)
    connection = front.open()
    asked = {"model": "405b", "prompt": "Why?", "temperature": 0, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Api-Key": key})
    response = connection.getresponse()
    for _ in range(3):
        while not response.readline().startswith(b"data:"):
            pass
    response.close()
    connection.close()
    wait_for_use(folder, {"alice": Use(requests=1, prompt_tokens=PROMPT, completion_tokens=3)})
    hang.unlink()
    wait_for_status(front, key, 200)


def test_a_gateway_writes_what_was_used_when_it_ends(service, program, make, folder):
    service.start(*GREEDY)
    key = make("alice")
    one = program("--port", "0").started()
    port = int(one.said.split("OPENAI_BASE_URL=")[1].split()[0].removesuffix("/v1").rpartition(":")[2])
    assert ask(Front(port), key).status == 200
    one.process.terminate()
    assert one.ended() == 0
    assert counted(folder) == {"alice": WHOLE}
    assert key not in one.said


def test_files_of_earlier_days_are_removed_and_damaged_ones_count_nothing(service, gateway, folder, make):
    make("alice")
    personal_keys.write_use(folder / personal_keys.file_name("2020-01-01", "a"), {"alice": WHOLE})
    personal_keys.write_use(folder / personal_keys.file_name(personal_keys.today(), "a"), {"alice": WHOLE})
    (folder / personal_keys.file_name(personal_keys.today(), "b")).write_text("{")
    gateway(key=OWNERS)
    assert not list(folder.glob("use-2020*"))
    assert counted(folder) == {"alice": WHOLE}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},"output_tokens":9}}', (7, 9)),
        (b'{"text":"\\"prompt_tokens\\": 99","usage":{"prompt_tokens":7,"total_tokens":7}}', (7, 0)),
        (b'{"usage":{"prompt_tokens":123456789012345678901234567890}}', (123456789, 0)),
        (b'{"text":"no usage"}', (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_figures_of_a_whole_answer_are_found_wherever_it_is_cut(body, wanted):
    for cut in range(len(body) + 1):
        count = AnswerCount(UnderWay(), Use())
        count.begin(is_stream=False)
        count.feed(body[:cut])
        count.feed(body[cut:])
        assert count.use == Use(requests=1, prompt_tokens=wanted[0], completion_tokens=wanted[1]), cut


def test_a_stream_of_anthropics_form_has_its_figures_in_two_events():
    count = AnswerCount(UnderWay(), Use(prompt_tokens=50, completion_tokens=50))
    count.begin(is_stream=True)
    count.feed(b'data: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":0}}}\n\n')
    count.feed(b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n')
    assert count.use == Use(requests=1, prompt_tokens=7, completion_tokens=1)
    count.feed(b'data: {"type":"message_delta","usage":{"output_tokens":5}}\n\n')
    assert count.use == Use(requests=1, prompt_tokens=7, completion_tokens=5)


IDS = b'data: {"choices":[{"text":"ab","token_ids":[7, 8]}]}\n\n'
FIRST = b'data: {"choices":[{"text":"a","prompt_token_ids":[1,2,3],"token_ids":[7]}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
NO_IDS = b'data: {"choices":[{"text":"a","token_ids":null,"prompt_token_ids":null}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (FIRST + IDS, (3, 3)),
        (FIRST + IDS + IDS[:30], (3, 3)),  # half an event is not passed on
        (FIRST + IDS + IDS + LAST, (3, 5)),
        (NO_IDS + NO_IDS, (9, 2)),
        (b'data: {"choices":[{"text":"\\"token_ids\\": [1,2,3]","token_ids":[5]}]}\n\n', (9, 1)),
        (FIRST + b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n', (3, 1)),
    ],
)
def test_a_stream_that_broke_counts_what_came_wherever_it_is_cut(stream, wanted):
    for cut in range(len(stream) + 1):
        count = AnswerCount(UnderWay(), Use(prompt_tokens=9, completion_tokens=99))
        count.begin(is_stream=True)
        count.feed(stream[:cut])
        count.feed(stream[cut:])
        assert count.use == Use(requests=1, prompt_tokens=wanted[0], completion_tokens=wanted[1]), cut


def test_a_whole_answer_that_broke_counts_a_token_for_four_bytes():
    count = AnswerCount(UnderWay(), Use(prompt_tokens=9, completion_tokens=99))
    count.begin(is_stream=False)
    count.feed(b"x" * 40)
    assert count.use == Use(requests=1, prompt_tokens=9, completion_tokens=10)
    count.feed(b"x" * 4000)
    assert count.use == Use(requests=1, prompt_tokens=9, completion_tokens=99)
    count.note_whole()  # an error of the engine, as it seems
    assert count.use == Use(requests=1)


# -- the command


def test_the_command_prints_a_key_once_and_keeps_its_hash(service, capsys, folder):
    assert run(["key", "add", "alice", "--tokens-a-day", "1000000"]) == 0
    told = capsys.readouterr()
    key = told.out.strip()
    assert told.out == f"{key}\n"
    assert len(key) >= 43
    assert key not in told.err
    text = (folder / "keys.json").read_text()
    assert key not in text
    assert personal_keys.hash_key(key.encode()) in text
    assert stat.S_IMODE((folder / "keys.json").stat().st_mode) == 0o600
    personal_keys.write_use(folder / personal_keys.file_name(personal_keys.today(), "a"), {"alice": WHOLE})
    personal_keys.write_use(folder / personal_keys.file_name(personal_keys.today(), "b"), {"alice": WHOLE})
    assert run(["key", "list"]) == 0
    cells = capsys.readouterr().out.splitlines()[-2].split()
    assert (cells[0], cells[2:]) == ("alice", ["any", "1,000,000", "2", str(2 * PROMPT), str(2 * WORDS), "0.00"])
    assert run(["key", "list", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["requests"], "key_sha256" in shown) == ("alice", 2, False)
    assert run(["key", "revoke", "alice"]) == 0
    assert run(["key", "list"]) == 0
    assert "Nobody has a key" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("add",),
        ("add", "a/b"),
        ("add", "älice"),
        ("add", "аlice"),  # the first letter is Cyrillic
        ("add", "alice\n"),
        ("add", "../alice"),
        ("add", "a" * 64),
        ("add", ""),
        ("add", "bob"),
        ("revoke",),
        ("revoke", "nobody"),
        ("list", "bob"),
        ("list", "--tokens-a-day", "5"),
        ("add", "carol", "--max-in-flight", "0"),
    ],
)
def test_what_the_command_refuses(service, make, words, capsys):
    make("bob")
    assert run(["key", *words]) == 2
    assert capsys.readouterr().out == ""


def test_keys_that_are_made_at_once_are_all_kept(service, make, folder):
    threads = [threading.Thread(target=make, args=(f"p{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(one.name for one in personal_keys.read_people(folder)) == [f"p{number}" for number in range(8)]


def test_a_shared_folder_for_persons_with_keys_of_their_own_has_none(service, program, make, tmp_path):
    service.start(*GREEDY)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    (shared / "api_key").write_text("of an earlier run")
    one = program("--port", "0", "--host", "0.0.0.0", "--share", str(shared), "--own-keys").started()
    wait_for(lambda: "each needs a key of their own" in one.said, 60, what="its last word")
    assert sorted(path.name for path in shared.iterdir()) == ["certificate.pem", "env.sh", "trusted.pem"]
    script = f'source {shared}/env.sh && curl -s -o /dev/null -w "%{{http_code}}" -K - "$OPENAI_BASE_URL/models"'
    environ = {"PATH": "/usr/bin:/bin"}
    for key, status in ((make("alice"), "200"), ("x" * 43, "401")):
        header = f'header = "Authorization: Bearer {key}"'

        def answered(header: str = header, status: str = status) -> bool:
            done = subprocess.run(["bash", "-c", script], env=environ, input=header, capture_output=True, text=True)
            return done.stdout == status

        wait_for(answered, 60, what=status)
