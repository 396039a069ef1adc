"""Requests from a seed and from files; texts of a given length."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from hpc_serve.bench.run import Lengths
from hpc_serve.bench.workload import WORDS, Sample, choose, completions, fit, read_samples
from hpc_serve.errors import InvalidRequestError

VOCABULARY = list(range(100, 200))
SOME = Lengths(input_len=30, output_len=7)


def test_prompts_have_their_lengths_and_follow_from_the_seed():
    first, again, other = (completions(VOCABULARY, SOME, 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(one.body["prompt"]) for one in first} == {30}
    assert {one.body["max_tokens"] for one in first} == {7}
    assert len({tuple(one.body["prompt"]) for one in first}) == 5
    assert set().union(*(one.body["prompt"] for one in first)) <= set(VOCABULARY)


def test_prefixes_are_shared_equally_often():
    made = completions(VOCABULARY, SOME, 12, 0, prefix_len=20, num_prefixes=3)
    prefixes = [tuple(one.body["prompt"][:20]) for one in made]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({tuple(one.body["prompt"]) for one in made}) == 12
    assert {one.input_len for one in made} == {30}


def test_few_different_tokens_are_refused():
    with pytest.raises(InvalidRequestError, match="only 3 different tokens"):
        completions([1, 2, 3], SOME, 1, 0)


def test_custom_files_have_prompts_ids_or_messages():
    lines = [
        {"prompt": "why?", "output_tokens": 9},
        {"prompt": [5, 6]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "one\u2028two\x85three"},
    ]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    assert read_samples("custom", text, "f") == [
        Sample(prompt="why?", output_len=9),
        Sample(prompt=[5, 6]),
        Sample(messages=[{"role": "user", "content": "a"}]),
        Sample(prompt="one\u2028two\x85three"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "f, line 1 is no JSON"),
        ('{"prompt": "a"}\n{"question": "a"}', "f, line 2 is no request"),
        ('{"prompt": ["a"]}', "f, line 1 is no request"),
        ('{"messages": []}', "f, line 1 is no request"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ("[1]", "f, line 1 is no JSON object"),
        ("", "f holds no request"),
    ],
)
def test_a_custom_file_that_cannot_be_used_says_where(text, words):
    with pytest.raises(InvalidRequestError, match=words):
        read_samples("custom", text, "f")


def test_sharegpt_is_the_first_two_turns():
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}, {"from": "human", "value": "ah"}]
    text = json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"id": 1}])
    assert read_samples("sharegpt", text, "f") == [Sample(prompt="why?", answer="so.")]


def test_more_requests_than_a_file_has_are_some_of_them_again():
    samples = [Sample(prompt=str(number)) for number in range(5)]
    assert choose(samples, 3, 1) == choose(samples, 5, 1)[:3] == choose(samples, None, 1)[:3]
    assert len(choose(samples, 12, 1)) == 12
    assert set(choose(samples, 12, 1)) == set(samples)


@pytest.mark.parametrize("length", [6, 7, 50, 51, 52, 53, 199, 1000])
@pytest.mark.parametrize("first", [1, 40, 5000])
def test_a_text_is_made_as_long_as_asked_for(length, first):
    """With a tokenizer for which words are one to three tokens, and a template of five tokens."""

    async def count(text):
        return 5 + sum(1 + len(word) // 4 for word in text.split())

    words = " ".join(random.Random(length).choices(WORDS, k=length + 64))
    text = asyncio.run(fit(words, length, count, first=first))
    assert asyncio.run(count(text)) == length


def test_a_text_that_cannot_be_as_long_is_as_near_as_it_can():
    async def count(text):
        return 10 * len(text.split())

    text = asyncio.run(fit(" ".join(["word"] * 50), 95, count, first=3))
    assert len(text.split()) == 9
