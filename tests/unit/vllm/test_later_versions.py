"""The data of a later vLLM holds what differs from the pinned version, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_serve.vllm.arguments import known_versions, load_data, options, pinned_version
from tests.support.vllm_options import as_text, with_later

SEED: dict[str, Any] = {"names": ["--seed"], "values": "1", "kind": "integer"}
EAGER: dict[str, Any] = {"names": ["--eager"], "values": "0", "kind": "switch", "negated": ["--no-eager"]}
KIND: dict[str, Any] = {"names": ["--kind"], "values": "1", "kind": "text", "choices": ["a", "b"]}


def test_what_differs_is_stored_and_a_second_run_replaces_it() -> None:
    pinned = {"version": "1.0", "options": [SEED, EAGER, KIND]}
    any_kind = {key: value for key, value in KIND.items() if key != "choices"}
    new = {"names": ["--new"], "values": "0", "kind": "switch"}
    once = with_later(pinned, "1.10.0", [SEED, any_kind, new])
    (later,) = once["later"]
    assert later == {
        "version": "1.10.0",
        "gone": ["--eager"],
        "options": [{"names": ["--kind"], "choices": None}, new],
    }
    twice = with_later(with_later(once, "1.10.0", [SEED, EAGER, KIND]), "1.9.0", [SEED, EAGER, KIND, new])
    assert [(one["version"], len(one["options"])) for one in twice["later"]] == [("1.9.0", 1), ("1.10.0", 0)]


def test_the_file_is_as_the_program_writes_it() -> None:
    file = Path(__file__).parents[3] / "hpc_serve/vllm/data/options.json"
    assert file.read_text(encoding="utf-8") == as_text(load_data("options.json"))


def test_no_pinned_option_is_stored_again() -> None:
    pinned = {entry["names"][0]: entry for entry in load_data("options.json")["options"]}
    for later in load_data("options.json")["later"]:
        assert all(pinned.get(entry["names"][0]) != entry for entry in later["options"])


def test_every_known_version_has_the_options_that_the_launcher_adds() -> None:
    added = ("--host", "--port", "--middleware", "--ssl-keyfile", "--ssl-certfile", "--shutdown-timeout", "--nnodes")
    assert known_versions()[0] == pinned_version()
    for version in known_versions():
        assert set(added) <= set(options(version))
