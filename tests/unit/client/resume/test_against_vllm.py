"""Broken streams against vLLM's own detokenizer and tokenizer: which text comes with which token is its decision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_serve.client.resume.relay import Relay
from hpc_serve.client.resume.stream import read_request
from hpc_serve.demo_model import make_demo_model
from tests.unit.client.resume.engine import Engine
from tests.unit.client.resume.test_relay import CHAT, COMPLETIONS, ask, cut_off, fed, go_on, request, seen

tokenizers = pytest.importorskip("tokenizers")
detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")

TEXT = "The people of the place: Zürich, 20 € — and 😀 what they said there was no word more"
PROMPT = "Why is the "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_demo_model(folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


class DetokenizingEngine(Engine):
    """Its answer is a list of tokens, and their text comes when vLLM's detokenizer gives it."""

    def __init__(self, tokenizer: Any, ids: list[int], **options: Any) -> None:
        super().__init__("", **options)
        self.tokenizer, self.ids = tokenizer, ids
        self.prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids

    def detokenize(self, content: bytes) -> dict[str, Any]:
        return {"prompt": self.tokenizer.decode(json.loads(content)["tokens"], skip_special_tokens=False)}

    def _steps(self, made: list[int], body: dict[str, Any], most: int) -> Iterator[tuple[int, str, str | None]]:
        stop = body.get("stop") or []
        wishes = SimpleNamespace(
            stop=stop,
            min_tokens=body.get("min_tokens") or 0,
            include_stop_str_in_output=bool(body.get("include_stop_str_in_output")),
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
        )
        asked = SimpleNamespace(sampling_params=wishes, prompt_token_ids=[*self.prompt, *made], request_id="1")
        text = detokenizer.FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=self.tokenizer), asked)
        for count, token in enumerate(self.ids[len(made) :], start=1):
            stopped = text.update([token], False)
            is_last = count + len(made) == len(self.ids)
            finish = "stop" if stopped is not None or is_last else "length" if count == most else None
            yield token, text.get_next_output_text(finish is not None, True), finish
            if finish:
                return


WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"max_tokens": 30},
    "stop": {"stop": ["what they", "never comes, not at all"]},
    "stop kept": {"stop": ["and 😀 w"], "include_stop_str_in_output": True},
    "not too early": {"stop": ["the "], "min_tokens": 25},
}


@pytest.mark.parametrize("several", [1, 4])
@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_greedy_streams_are_the_same_after_each_token(tokenizer, path, wishes, several):
    read = read_request(*request(path, **{"stop": [], **wishes}))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    raw = DetokenizingEngine(tokenizer, ids, several=several).stream(path, read.content)
    whole = seen(raw)
    assert "\N{REPLACEMENT CHARACTER}" not in whole.text
    events = raw.split(b"\n\n")
    for count in range(len(events)):
        relay = Relay(read)
        user = fed(relay, b"".join(event + b"\n\n" for event in events[:count]))
        if not relay.is_done:
            relay.read()
            rest = relay.rest()
            if rest is None:
                rest = fed(relay, go_on(relay, DetokenizingEngine(tokenizer, ids, name="b", several=several)))
            user += rest
        shown = seen(user)
        assert (shown.text, shown.ids, shown.finish) == (whole.text, whole.ids, whole.finish), count


@pytest.mark.parametrize("several", [1, 4])
@pytest.mark.parametrize("stop", [[], ["never comes"]], ids=["no stop", "stop"])
def test_sampled_streams_go_on_after_each_token(tokenizer, several, stop):
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    other = tokenizer.encode(" Some other text €.", add_special_tokens=False).ids
    engine, wishes = DetokenizingEngine(tokenizer, ids, several=several), {"temperature": 0.7, "stop": stop}
    for count in range(2, engine.stream(*request(CHAT, **wishes)).count(b"\n\n") - 1):
        relay, user = cut_off(CHAT, count, engine, **wishes)
        if not seen(user).text:
            continue
        asked = json.loads(ask(relay, engine).content)
        kept = asked["prompt"][len(engine.prompt) :]
        assert kept == ids[: len(kept)]
        shown = seen(user + fed(relay, go_on(relay, DetokenizingEngine(tokenizer, [*kept, *other], name="b"))))
        assert shown.text == tokenizer.decode([*kept, *other])
        assert shown.text.startswith(seen(user).text)
