"""The plan of every model of the catalogue is as it was: every number and every word that `plan --json` prints.

Each model is planned for H100s and in one further way. Two plans of a model are two entries: parameters, layout, tokens
of the cache, and a digest of the whole document. `python -m tests.support.plan_numbers` writes changes that are meant.
"""

from __future__ import annotations

import json

from hpc_serve.plan.catalog import models
from tests.support.plan_numbers import NUMBERS, planned


def test_the_plan_of_every_model_is_as_it_was(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no weights that lie on this machine
    assert {name: planned(name) for name in sorted(models())} == json.loads(NUMBERS.read_text())
