"""The program in the job, with a stand-in for llm-compressor that writes what a test wants.

The real one was run by hand (docs/guides/weights.md): it takes 2 GB of packages that are not those of the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_serve.quantize.program import CannotQuantizeError, copy_other_files, read_texts

STAND_IN = """
import json, os
class _Saved:
    def __init__(self, name): self.name = name
    def save_pretrained(self, folder, **_):
        (folder / self.name).write_text("written")
        if os.environ.get("FAILS_AFTER") == self.name:
            raise RuntimeError("no room")
    def __call__(self, text, **_): return {"input_ids": [1], "attention_mask": [1]}
class _Pretrained:
    def __init__(self, name): self.name = name
    def from_pretrained(self, *_, **given):
        assert given["trust_remote_code"] is False
        return _Saved(self.name)
AutoModelForCausalLM, AutoTokenizer = _Pretrained("config.json"), _Pretrained("tokenizer.json")
class Dataset:
    from_list = list
class _Modifier:
    def __init__(self, **named): self.named = named
class GPTQModifier(_Modifier): pass
class QuantizationModifier(_Modifier): pass
class SmoothQuantModifier(_Modifier): pass
def oneshot(model, recipe, **given):
    given["dataset"] = given.get("dataset")
    if os.environ.get("SOMEBODY_MAKES"):
        open(os.environ["SOMEBODY_MAKES"], "w").close()
    print("ONESHOT", json.dumps([[type(one).__name__, one.named] for one in recipe]), json.dumps(given))
"""


MODULES = (
    *("transformers.py", "datasets.py", "llmcompressor/__init__.py", "llmcompressor/modifiers/gptq.py"),
    *("llmcompressor/modifiers/quantization.py", "llmcompressor/modifiers/transform/smoothquant.py"),
)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of modules with the names of llm-compressor's and of what it stands on, each with all stand-ins."""
    folder = tmp_path / "packages"
    for module in MODULES:
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        (folder / module).write_text(STAND_IN)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "LICENSE", "preprocessor.json"):
        (folder / name).write_text(f"of the model: {name}")
    return folder


Quantize = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def quantize(model: Path, packages: Path, out: Path) -> Quantize:
    """Run the program on the model with these words, which must end with this exit code; it writes to `out`."""

    def run(*words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        argv = ["--model", str(model), "--scheme", "INT8", "--output", str(out), *words]
        path = os.pathsep.join(map(str, (packages, Path(__file__).parents[3])))
        done = subprocess.run(
            [sys.executable, "-m", "hpc_serve.quantize.program", *argv],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


@pytest.fixture
def partial(out: Path) -> Path:
    out.parent.mkdir()
    return out.with_name("out.partial")


def test_the_output_has_the_new_weights_and_the_other_files(quantize: Quantize, out: Path) -> None:
    done = quantize()
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "config.json": "written",
        "tokenizer.json": "written",
        "LICENSE": "of the model: LICENSE",
        "preprocessor.json": "of the model: preprocessor.json",
    }
    assert '[["QuantizationModifier"' in done.stdout
    assert '"scheme": "INT8"' in done.stdout


def test_with_texts_activations_are_measured(quantize: Quantize, tmp_path: Path) -> None:
    texts = lines(tmp_path, {"text": "one"}, {"text": "two"}, {"text": "three"})
    done = quantize("--calibration", texts, "--samples", "2")
    for words in ("SmoothQuantModifier", "GPTQModifier", '"num_calibration_samples": 2'):
        assert words in done.stdout


def test_a_failure_leaves_nothing_behind(quantize: Quantize, out: Path, partial: Path) -> None:
    partial.mkdir()  # of a job that was killed
    (partial / "half").touch()
    assert "no room" in quantize(code=1, FAILS_AFTER="tokenizer.json").stderr
    assert list(out.parent.iterdir()) == []


def test_what_is_there_is_not_replaced(quantize: Quantize, out: Path) -> None:
    out.mkdir(parents=True)
    assert "is there already" in quantize(code=78).stderr
    assert list(out.iterdir()) == []


def test_an_environment_without_llm_compressor_is_named(quantize: Quantize, packages: Path) -> None:
    (packages / "llmcompressor" / "__init__.py").write_text("raise ImportError('not here')")
    said = quantize(code=78).stderr
    assert "has no llm-compressor (not here): pip install -r envs/quantize/requirements.txt" in said


def lines(tmp_path: Path, *entries: object) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return str(path)


def test_texts_are_read_from_the_forms_that_people_have(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    path = lines(tmp_path, '\ufeff{"text": "a"}', "", {"prompt": "b"}, chat, {"text": "too many"})
    assert list(read_texts(path, 3)) == ["a", "b", "Hello\nHi"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["not JSON"], "cannot be read as JSONL"),
        ([{"text": "a"}, {"other": "b"}], "texts.jsonl:2 has no text"),
        ([["a"]], "texts.jsonl:1 has no text"),
        ([], "holds no texts"),
    ],
)
def test_texts_that_cannot_be_read_are_named(tmp_path: Path, entries: list[object], said: str) -> None:
    with pytest.raises(CannotQuantizeError, match=said):
        list(read_texts(lines(tmp_path, *entries), 5))


def test_files_that_are_no_weights_are_copied_where_there_is_none(model: Path, tmp_path: Path) -> None:
    """Engine arguments of the model's owner are not: in the output they would be taken for the user's own words."""
    (model / "hpc-serve-args.txt").write_text("--max-num-seqs 1")
    (tmp_path / "key").write_text("mine")
    (tmp_path / "key").chmod(0o600)
    (model / "NOTICE").symlink_to(tmp_path / "key")
    output = tmp_path / "out"
    output.mkdir()
    (output / "LICENSE").write_text("new")
    copy_other_files(model, output)
    assert (output / "LICENSE").read_text() == "new"
    assert {path.name for path in output.iterdir()} == {"LICENSE", "NOTICE", "config.json", "preprocessor.json"}
    assert (output / "NOTICE").stat().st_mode & 0o777 == 0o600, "what a link leads to stays private"


def test_a_link_in_the_place_of_what_is_made_is_not_followed(quantize: Quantize, partial: Path, tmp_path: Path) -> None:
    partial.symlink_to(tmp_path)
    assert "out.partial cannot be made: File exists. Remove it, or set --output." in quantize(code=78).stderr
    assert not (tmp_path / "config.json").exists()


def test_a_whole_model_is_kept_where_somebody_takes_its_name_meanwhile(quantize, out, partial):
    said = quantize(code=78, SOMEBODY_MAKES=str(out)).stderr
    assert "out.partial holds the quantised model, and cannot be renamed to" in said
    assert (partial / "tokenizer.json").read_text() == "written"
