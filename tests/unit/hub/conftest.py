"""What tests of `fetch` share: a hub on this machine, and a cache of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc_serve.hub import fetch as fetched
from hpc_serve.hub.local_weights import HubSettings, read_hub_settings
from tests.support.fake_hub import FakeHub, model_files, running_hub

MODEL = "org/model"


@pytest.fixture
def hub(monkeypatch):
    hub_download = pytest.importorskip("huggingface_hub.file_download")
    monkeypatch.setattr(fetched, "_PAUSES_S", (0.001, 0.001, 0.001))
    monkeypatch.setattr(hub_download, "time", SimpleNamespace(sleep=lambda _: None))
    with running_hub(FakeHub(models={MODEL: model_files()})) as running:
        yield running


@pytest.fixture
def settings(hub, tmp_path) -> HubSettings:
    return replace(read_hub_settings({"HF_HOME": str(tmp_path / "hf")}), endpoint=hub.url, is_offline=False, token=None)
