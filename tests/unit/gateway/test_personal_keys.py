"""Keys of persons at a gateway: who is let in, for how long, how much, and what is counted."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.gateway import personal_keys, request
from hpc_serve.gateway.personal_keys import AnswerCount, UnderWay, Use, add_person, expected_use, hash_key, revoke_key
from tests.cluster import wait_for
from tests.support.stub_engine import chat_context, encode
from tests.unit.gateway.conftest import ANSWER, ASKED, WORDS, Front

OWNERS = "k" * 32
PROMPT = len(encode("Why?"))
LOOK_S = request.LOOK_S
WHOLE = Use(requests=1, prompt_tokens=PROMPT, completion_tokens=WORDS)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch) -> None:
    monkeypatch.setattr(request, "LOOK_S", 0.05)


@pytest.fixture
def alice(make) -> str:
    return make("alice")


@pytest.fixture
def bob(make) -> str:
    return make("bob")


@pytest.fixture
def front(engine, gateway, alice, bob) -> Front:
    """A gateway to one engine that asks for the key of its owner, of alice or of bob."""
    return gateway(key=OWNERS)


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
    return front.ask("POST", "/v1/completions", {**ASKED, **fields}, **headers)


def wait_for_status(front: Front, key: str, wanted: int, timeout_s: float = 60) -> None:
    wait_for(lambda: ask(front, key).status == wanted, timeout_s, what=f"HTTP {wanted}")


def counted(folder) -> dict[str, Use]:
    return personal_keys.read_use(folder, personal_keys.today())


def wait_for_use(folder, wanted: dict[str, Use]) -> None:
    wait_for(lambda: counted(folder) == wanted, 60, what=f"{wanted}")


def write_use(folder, gateway: str, use: Use = WHOLE, day: str | None = None) -> None:
    """Write what a gateway says that alice has used, today or on another day."""
    name = personal_keys.file_name(day or personal_keys.today(), gateway)
    personal_keys.write_use(folder / name, {"alice": use})


# -- who is let in


def test_the_owners_key_and_each_persons_are_taken_and_no_other(front, alice, bob):
    for key in (OWNERS, alice, bob):
        assert ask(front, key).json["choices"][0]["text"] == ANSWER
    for wrong in (None, "", "x" * 43, alice[:-1], f"{alice}x", alice.swapcase(), hash_key(alice.encode())):
        ask(front, wrong).check_refusal(401, "invalid_api_key")
    assert front.ask("GET", "/v1/models", X_Api_Key=alice).status == 200


def test_a_key_is_taken_and_refused_again_without_a_restart(engine, gateway, make, folder, monkeypatch):
    monkeypatch.setattr(request, "LOOK_S", LOOK_S)
    front = gateway(key=OWNERS)
    key = make("alice")
    wait_for_status(front, key, 200)
    connection = front.open()

    def status() -> int:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        with connection.getresponse() as response:
            response.read()
            return response.status

    assert status() == 200
    revoke_key(folder, "alice")
    wait_for(lambda: status() == 401, 5, what="the end of the key on a connection that stays open")
    assert (ask(front, key).status, ask(front, OWNERS).status) == (401, 200)
    connection.close()


def test_a_new_key_takes_the_place_of_a_revoked_one(make, folder):
    first = make("alice")
    revoke_key(folder, "alice")
    second = make("alice")
    assert [one.key_sha256 for one in personal_keys.read_people(folder)] == [hash_key(second.encode())]
    assert first != second


def test_a_file_that_others_can_change_is_refused(front, alice, folder, refused):
    assert ask(front, alice).status == 200
    (folder / "keys.json").chmod(0o666)
    wait_for_status(front, alice, 401)
    assert ask(front, OWNERS).status == 200
    assert "can be changed by" in refused("--port", "0", code=5)


def _of_a_stranger(file: Path) -> None:
    os.chown(file, 64_999, 64_999)


def _a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere.json"))
    file.symlink_to("elsewhere.json")


def _with_a_limit_in_words(file: Path) -> None:
    file.write_text(file.read_text().replace("null", '"many"', 1))


SPOILT_BY_OTHERS = [
    (_of_a_stranger, "belongs to user 64999"),
    (lambda file: file.chmod(0o662), "can be changed by everybody"),
]
DAMAGED = [
    (_a_link, "is a symbolic link"),
    (lambda file: file.write_text("{"), "is not JSON"),
    (lambda file: file.write_text("{}"), "has no field people"),
    (_with_a_limit_in_words, "max_in_flight is 'many'"),
]


@pytest.mark.parametrize(("spoil", "says"), [*SPOILT_BY_OTHERS, *DAMAGED])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_spoilt_file_is_neither_believed_nor_written_over(make, alice, folder, spoil, says):
    file = folder / "keys.json"
    spoil(file)
    before = os.lstat(file)
    for use_it in (lambda: make("bob"), lambda: revoke_key(folder, "alice")):
        with pytest.raises(RecordError, match=says):
            use_it()
    assert os.lstat(file).st_ino == before.st_ino


@pytest.mark.parametrize(("spoil", "says"), DAMAGED)
def test_over_a_damaged_file_the_last_keys_hold_and_it_is_said_what_to_do(make, folder, spoil, says, ran, caplog):
    revoked, alice = make("bob"), make("alice")
    running = request.People(folder)
    revoke_key(folder, "bob")
    running.look()
    spoil(folder / "keys.json")
    running.look()
    begun = request.People(folder)  # it knows no last keys
    taken = [[one.with_key(key.encode()) is not None for key in (alice, revoked)] for one in (running, begun)]
    assert taken == [[True, False], [False, False]]
    for told in (ran(["key", "list"], 5).err, *(record.message for record in caplog.records)):
        words = " ".join(told.split())
        assert says in words
        assert "Gateways that run keep to the keys that they read last" in words
        assert "hpc-serve key add" in words
        assert "emove it" not in words  # that would end all keys: it is said as what it is
    assert len(caplog.records) == 2
    (folder / "keys.json").unlink()
    running.look()
    assert running.with_key(alice.encode()) is None


def test_a_gateway_that_starts_on_a_damaged_file_serves_its_owner(engine, gateway, alice, folder):
    text = (folder / "keys.json").read_text()
    (folder / "keys.json").write_text(text[:20])
    front = gateway(key=OWNERS)
    assert (ask(front, OWNERS).status, ask(front, alice).status) == (200, 401)
    (folder / "keys.json").write_text(text)
    wait_for_status(front, alice, 200)


def test_a_full_disk_keeps_the_keys_and_tells_of_none(alice, folder, monkeypatch, ran):
    before = (folder / "keys.json").read_text()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpc_serve.rendezvous.files.os.fsync", full)
        for words in (("add", "bob"), ("revoke", "alice")):
            told = ran(["key", *words], 5)
            assert told.out == ""
            assert "No space left" in told.err
    assert (folder / "keys.json").read_text() == before
    assert [path.name for path in folder.iterdir()] == ["keys.json"]


def test_a_limit_that_the_file_cannot_hold_is_refused_and_the_largest_is_kept(service, folder, ran):
    for number, code in ((2**63 - 1, 0), (2**63, 2), (10**30, 2)):
        words = ("--tokens-a-day", str(number), "--max-in-flight", str(number))
        ran(["key", "add", f"of-{number}", *words], code)
    (alone,) = personal_keys.read_people(folder)
    assert (alone.max_in_flight, alone.tokens_a_day) == (2**63 - 1, 2**63 - 1)


def test_a_gateway_that_asks_for_no_key_knows_no_persons(engine, gateway, make):
    front = gateway()
    assert ask(front, make("alice", tokens_a_day=1)).status == 200
    assert ask(front, "whatever").status == 200


# -- limits


def test_so_many_requests_are_under_way_and_no_more(hanging, gateway, make, bob):
    hang = hanging()
    key = make("alice", max_in_flight=1)
    front = gateway(key=OWNERS)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(ask, front, key) for _ in range(3)]
        wait_for(lambda: sum(one.done() for one in asked) == 2, 60, what="the refusals")
        answer = ask(front, key)
        hang.unlink()
    answer.check_refusal(429, "person_in_flight", "alice has 1 requests under way")
    assert (answer.json["error"]["type"], answer.headers["retry-after"]) == ("rate_limit_error", "1")
    assert sorted(one.result().status for one in asked) == [200, 429, 429]
    assert ask(front, key).status == ask(front, bob).status == 200


def test_over_the_tokens_of_a_day_a_person_waits_for_the_next(engine, gateway, make, bob, monkeypatch):
    key = make("alice", tokens_a_day=PROMPT + WORDS + 1)
    front = gateway(key=OWNERS)
    assert [ask(front, key).status for _ in range(2)] == [200, 200]  # the second began below the limit
    answer = ask(front, key)
    answer.check_refusal(429, "person_tokens", f"alice has used {2 * (PROMPT + WORDS):,} tokens today")
    assert 0 < int(answer.headers["retry-after"]) <= 25 * 3600
    assert ask(front, bob).status == ask(front, OWNERS).status == 200
    monkeypatch.setattr(personal_keys, "today", lambda: "2999-01-01")
    assert ask(front, key).status == 200


def test_requests_under_way_count_for_the_tokens_of_a_day(hanging, gateway, make):
    hang = hanging()
    key = make("alice", tokens_a_day=200)
    front = gateway(key=OWNERS)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, front, key, max_tokens=100) for _ in range(8)]
        wait_for(lambda: sum(one.done() for one in asked) == 6, 60, what="the refusals")  # two hold more than 200
        refused = [one.result() for one in asked if one.done()]
        hang.unlink()
    for answer in refused:
        answer.check_refusal(429, "person_tokens", "Requests under way may use the rest")
        assert answer.headers["retry-after"] == "1"
    assert sorted(one.result().status for one in asked) == [200, 200, *[429] * 6]
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


def test_the_limit_of_a_day_counts_what_other_gateways_and_earlier_ones_answered(engine, gateway, make, folder):
    key = make("alice", tokens_a_day=10**9)
    one, two = gateway(key=OWNERS), gateway(key=OWNERS)
    assert ask(one, key).status == ask(two, key).status == 200
    wait_for_use(folder, {"alice": WHOLE + WHOLE})
    write_use(folder, "third", Use(requests=1, prompt_tokens=10**9))
    for front in (one, two, gateway(key=OWNERS)):
        wait_for_status(front, key, 429)


# -- counts


def test_whole_answers_and_streams_are_counted_for_persons_alone(make, engine, gateway, alice, bob, folder):
    carol = make("carol")
    front = gateway(key=OWNERS)
    assert ask(front, alice).status == ask(front, OWNERS).status == 200
    streamed = ask(front, bob, stream=True, stream_options={"include_usage": True})
    assert streamed.body.count(b'"usage": {') == 1
    assert b'"usage"' not in ask(front, carol, stream=True).body
    assert ask(front, carol, max_tokens=-1).status == 400
    wait_for_use(folder, {"alice": WHOLE, "bob": WHOLE, "carol": replace(WHOLE, requests=2)})
    assert not {b"alice", b"bob", b"carol"} & set(front.ask("GET", "/metrics", X_Api_Key=OWNERS).body.split(b'"'))


def test_requests_at_once_share_the_time_of_the_gpus(service, gateway, alice, bob, folder):
    seconds, gpus = 1.0, 8
    service.start("--stub-words", "2", "--stub-word-s", str(seconds / 2), gpus_per_node=gpus)
    front = gateway(key=OWNERS)
    with ThreadPoolExecutor(3) as threads:
        assert [one.status for one in threads.map(ask, [front] * 3, (alice, alice, bob))] == [200] * 3
    wait_for(lambda: sum(one.requests for one in counted(folder).values()) == 3, 60, what="the use of all three")
    used = {name: one.gpu_seconds for name, one in counted(folder).items()}
    # The three shares are a third, a half and all of the time, as requests end one after the other.
    assert gpus * seconds * 3 / 3 <= sum(used.values()) < gpus * 60
    assert used["bob"] >= gpus * seconds / 3


def test_a_stream_without_usage_counts_its_token_ids_or_the_events_that_carry_text(front, alice, bob, folder):
    messages = [{"role": "user", "content": "Why?"}]
    body = {"model": "405b", "messages": messages, "temperature": 0, "stream": True}
    assert front.ask("POST", "/v1/chat/completions", body, X_Api_Key=alice).status == 200
    body |= {"tools": [{"type": "function", "function": {"name": "look"}}]}  # of such a stream no ids are asked for
    answer = front.ask("POST", "/v1/chat/completions", body, X_Api_Key=bob)
    assert (answer.status, b"token_ids" in answer.body) == (200, False)
    prompts = {"alice": len(encode(chat_context(messages))), "bob": len(json.dumps(body)) // 4}
    wait_for_use(folder, {name: replace(WHOLE, prompt_tokens=prompt) for name, prompt in prompts.items()})


def test_what_a_stream_has_sent_counts_when_its_reader_leaves(hanging, gateway, make, folder):
    hang = hanging("--stub-hang-after", "3")
    key = make("alice", max_in_flight=1)
    front = gateway(key=OWNERS)
    connection = front.open()
    body = json.dumps({**ASKED, "stream": True, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Api-Key": key})
    response = connection.getresponse()
    for _ in range(3):
        while not response.readline().startswith(b"data:"):
            pass
    response.close()
    connection.close()
    wait_for_use(folder, {"alice": replace(WHOLE, completion_tokens=3)})
    hang.unlink()
    wait_for_status(front, key, 200)


def test_a_gateway_writes_what_was_used_when_it_ends(engine, program, alice, folder):
    one = program("--port", "0").started()
    assert ask(Front(one.port), alice).status == 200
    one.process.terminate()
    assert one.ended() == 0
    assert counted(folder) == {"alice": WHOLE}
    assert alice not in one.said


def test_files_of_earlier_days_are_removed_and_damaged_ones_count_nothing(gateway, folder, alice):
    write_use(folder, "a", day="2020-01-01")
    write_use(folder, "a")
    (folder / personal_keys.file_name(personal_keys.today(), "b")).write_text("{")
    gateway(key=OWNERS)
    assert not list(folder.glob("use-2020*"))
    assert counted(folder) == {"alice": WHOLE}


def test_a_stream_of_anthropics_form_has_its_figures_in_two_events():
    events = (
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":0}}}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n',
        b'data: {"type":"message_delta","usage":{"output_tokens":5}}\n\n',
    )
    assert use_of(*events[:2], is_stream=True) == (7, 1)
    assert use_of(*events, is_stream=True) == (7, 5)


def use_of(*parts: bytes, is_stream: bool, is_whole: bool = True) -> tuple[int, int]:
    """Return the tokens of an answer that came in these parts, to a request that may use 9 and 99."""
    count = AnswerCount(UnderWay(), Use(prompt_tokens=9, completion_tokens=99))
    count.begin(is_stream=is_stream)
    for part in parts:
        count.feed(part)
    if is_whole:
        count.note_whole()
    assert count.use.requests == 1
    return count.use.prompt_tokens, count.use.completion_tokens


IDS = b'data: {"choices":[{"text":"ab","token_ids":[7, 8]}]}\n\n'
FIRST = b'data: {"choices":[{"text":"a","prompt_token_ids":[1,2,3],"token_ids":[7]}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
NO_IDS = b'data: {"choices":[{"text":"a","token_ids":null,"prompt_token_ids":null}]}\n\n'


WHOLE_ANSWERS = [
    (b'{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},"output_tokens":9}}', (7, 9)),
    (b'{"text":"\\"prompt_tokens\\": 99","usage":{"prompt_tokens":7,"total_tokens":7}}', (7, 0)),
    (b'{"usage":{"prompt_tokens":123456789012345678901234567890}}', (123456789, 0)),
    (b'{"text":"no usage"}', (0, 0)),
    (b"", (0, 0)),
]
BROKEN_STREAMS = [
    (FIRST + IDS, (3, 3)),
    (FIRST + IDS + IDS[:30], (3, 3)),  # half an event is not passed on
    (FIRST + IDS + IDS + LAST, (3, 5)),
    (NO_IDS + NO_IDS, (9, 2)),
    (b'data: {"choices":[{"text":"\\"token_ids\\": [1,2,3]","token_ids":[5]}]}\n\n', (9, 1)),
    (FIRST + b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n', (3, 1)),
]


@pytest.mark.parametrize(
    ("answer", "wanted", "is_stream"),
    [*((*one, False) for one in WHOLE_ANSWERS), *((*one, True) for one in BROKEN_STREAMS)],
)
def test_figures_of_a_whole_answer_and_of_a_broken_stream_are_found_wherever_it_is_cut(answer, wanted, is_stream):
    for cut in range(len(answer) + 1):
        assert use_of(answer[:cut], answer[cut:], is_stream=is_stream, is_whole=not is_stream) == wanted, cut


def test_a_whole_answer_that_broke_counts_a_token_for_four_bytes():
    assert use_of(b"x" * 40, is_stream=False, is_whole=False) == (9, 10)
    assert use_of(b"x" * 4040, is_stream=False, is_whole=False) == (9, 99)
    assert use_of(b"x" * 4040, is_stream=False) == (0, 0)  # an error of the engine, as it seems


# -- the command


def test_the_command_prints_a_key_once_and_keeps_its_hash(service, ran, folder):
    told = ran(["key", "add", "alice", "--tokens-a-day", "1000000"])
    key = told.out.strip()
    assert told.out == f"{key}\n"
    assert len(key) >= 43
    assert key not in told.err
    text = (folder / "keys.json").read_text()
    assert key not in text
    assert hash_key(key.encode()) in text
    assert stat.S_IMODE((folder / "keys.json").stat().st_mode) == 0o600
    write_use(folder, "a")
    write_use(folder, "b")
    cells = ran(["key", "list"]).out.splitlines()[-2].split()
    assert (cells[0], cells[2:]) == ("alice", ["any", "1,000,000", "2", str(2 * PROMPT), str(2 * WORDS), "0.00"])
    (shown,) = json.loads(ran(["key", "list", "--json"]).out)
    assert (shown["name"], shown["requests"], "key_sha256" in shown) == ("alice", 2, False)
    ran(["key", "revoke", "alice"])
    assert "Nobody has a key" in ran(["key", "list"]).out


@pytest.mark.parametrize(
    "words",
    [
        *(("add", name) for name in ("a/b", "älice", "аlice", "alice\n", "../alice", "a" * 64, "")),  # one is Cyrillic
        *(("add",), ("add", "bob"), ("revoke",), ("revoke", "nobody"), ("list", "bob")),
        *(("list", "--tokens-a-day", "5"), ("add", "carol", "--max-in-flight", "0")),
    ],
)
def test_what_the_command_refuses(bob, words, ran):
    assert ran(["key", *words], 2).out == ""


def test_keys_that_are_made_at_once_are_all_kept(make, folder):
    names = [f"p{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, names))
    assert sorted(one.name for one in personal_keys.read_people(folder)) == names


def test_a_shared_folder_for_persons_with_keys_of_their_own_has_none(engine, program, alice, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    (shared / "api_key").write_text("of an earlier run")
    one = program("--port", "0", "--host", "0.0.0.0", "--share", str(shared), "--own-keys").started()
    wait_for(lambda: "each needs a key of their own" in one.said, 60, what="its last word")
    assert sorted(path.name for path in shared.iterdir()) == ["certificate.pem", "env.sh", "trusted.pem"]
    script = f'source {shared}/env.sh && curl -s -o /dev/null -w "%{{http_code}}" -K - "$OPENAI_BASE_URL/models"'

    def status(key: str) -> str:
        argv, header = ["bash", "-c", script], f'header = "Authorization: Bearer {key}"'
        done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin"}, input=header, capture_output=True, text=True)
        return done.stdout

    wait_for(lambda: status(alice) == "200", 60, what="an answer to alice")
    assert status("x" * 43) == "401"
