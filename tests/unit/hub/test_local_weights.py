"""Hugging Face's variables are read as huggingface_hub reads them; where it is installed, its own answers are asked."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_serve.hub.local_weights import cached_folder, read_hub_settings
from tests.support.fake_hub import cached

TOKEN = "hf_secretsecretsecret"
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"HF_HOME": "{home}/hf"},
    {"HF_HOME": "~/hf"},
    {"HF_HOME": "$ROOT/hf", "ROOT": "{home}/project"},
    {"HF_HOME": "${{ROOT}}/hf-$UNSET", "ROOT": "{home}/project"},
    {"XDG_CACHE_HOME": "{home}/xdg"},
    {"XDG_CACHE_HOME": "{home}/xdg", "HF_HOME": "{home}/hf"},
    {"HF_HUB_CACHE": "~/models"},
    {"HUGGINGFACE_HUB_CACHE": "{home}/old"},
    {"HUGGINGFACE_HUB_CACHE": "{home}/old", "HF_HUB_CACHE": "{home}/models", "HF_HOME": "{home}/hf"},
    {"HF_TOKEN": TOKEN},
    {"HF_TOKEN": f" {TOKEN}\r\n"},
    {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "hf_old"},
    {"HF_TOKEN_PATH": "{home}/elsewhere"},
    {"HF_TOKEN_PATH": "~/missing"},
    {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"},
    {"HF_HUB_OFFLINE": "1"},
    {"HF_HUB_OFFLINE": "On", "TRANSFORMERS_OFFLINE": "0"},
    {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
    {"TRANSFORMERS_OFFLINE": "yes"},
    {"HF_ENDPOINT": "https://mirror.example/hub//"},
)
ASK = """
import importlib, json, os, sys
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers
for environ in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environ)
    importlib.reload(constants)
    found = try_to_load_from_cache("acme/rocket-7b", "config.json")
    print(json.dumps({
        "cache": constants.HF_HUB_CACHE,
        "endpoint": constants.ENDPOINT,
        "is_offline": constants.HF_HUB_OFFLINE,
        "authorization": build_hf_headers().get("authorization"),
        "snapshot": os.path.dirname(found) if isinstance(found, str) else None,
    }))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Tokens and snapshots in several of the places that the variables name."""
    for number, folder in enumerate((".cache/huggingface", "hf", "project/hf", "xdg/huggingface")):
        cached(tmp_path / folder / "hub", "acme/rocket-7b", {}, f"{number}abc")
        (tmp_path / folder / "token").write_text(f"hf_of_{number}\n")
    for number, folder in enumerate(("models", "old")):
        cached(tmp_path / folder, "acme/rocket-7b", {}, f"{number}def")
    (tmp_path / "elsewhere").write_text(f"{TOKEN}\n")
    return tmp_path


def test_places_and_token_are_those_of_huggingface_hub(home: Path) -> None:
    if find_spec("huggingface_hub") is None:
        pytest.skip("huggingface_hub is not installed; it comes with vLLM")
    asked = [
        {"HOME": str(home), **{name: value.format(home=home) for name, value in environ.items()}}
        for environ in ENVIRONMENTS
    ]
    done = subprocess.run([sys.executable, "-c", ASK], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for environ, line in zip(asked, done.stdout.splitlines(), strict=True):
        settings = read_hub_settings(environ)
        snapshot = cached_folder("acme/rocket-7b", environ)
        ours = {
            "cache": str(settings.cache),
            "endpoint": settings.endpoint,
            "is_offline": settings.is_offline,
            "authorization": f"Bearer {settings.token}" if settings.token else None,
            "snapshot": str(snapshot) if snapshot else None,
        }
        assert ours == json.loads(line), environ


def test_a_token_file_of_strange_bytes_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert read_hub_settings({"HOME": str(tmp_path), "HF_HOME": str(tmp_path)}).token is None


def test_the_token_is_not_printed(tmp_path: Path) -> None:
    assert TOKEN not in repr(read_hub_settings({"HOME": str(tmp_path), "HF_TOKEN": TOKEN}))
