"""The program in the job: quantises a model's weights with llm-compressor, and writes a folder that vLLM serves.

It runs in an environment that has llm-compressor, and uses nothing of hpc-serve. The output folder appears once it is
whole: until then its name has `.partial` at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Routers and heads are small, and what they compute decides what comes after. Encoders of images see other numbers.
IGNORED = (
    "re:.*lm_head",
    r"re:.*\.(gate|router|shared_expert_gate)$",
    r"re:.*(vision|visual|audio|multi_modal_projector).*",
)
_SMOOTHING = 0.8  # how much of the range of activations goes to the weights: llm-compressor's own for W8A8
_UNUSABLE = 78
_NO_ROOM = 69
_OWN_CODE = {"local_files_only": True, "trust_remote_code": False}  # without the second, transformers asks a terminal
_MIB, _GIB = 1 << 20, 1 << 30
_ARGS_FILE = "hpc-serve-args.txt"  # engine arguments by the owner of the model's folder: a copy would be the user's own
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


class CannotQuantizeError(Exception):
    """Why the model cannot be quantised here, for a person. `exit_code` is the program's."""

    def __init__(self, text: str, exit_code: int = _UNUSABLE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is half done is removed
    try:
        quantize(options)
    except CannotQuantizeError as error:
        _say(str(error))
        return error.exit_code
    return 0


def quantize(options: argparse.Namespace) -> None:
    """Make `options.output`. Raises CannotQuantizeError; a model that is not whole is removed then."""
    output = Path(options.output)
    partial = output.with_name(f"{output.name}.partial")
    if output.exists():
        raise CannotQuantizeError(f"{output} is there already; remove it, or name another folder.")
    before = _weight_bytes(options.model)
    _check_room(output.parent, before)
    texts = list(read_texts(options.calibration, options.samples)) if options.calibration else []
    began_s = time.monotonic()
    shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
    try:
        partial.mkdir()
    except OSError as error:
        raise CannotQuantizeError(f"{partial} cannot be made: {error.strerror}. Remove it, or set --output.") from error
    try:
        _run(options, partial, texts)
        copy_other_files(Path(options.model), partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        os.rename(partial, output)
    except OSError as error:
        raise CannotQuantizeError(
            f"{partial} holds the quantised model, and cannot be renamed to {output} ({error.strerror}). "
            "Somebody has made that name meanwhile: rename the folder to another one."
        ) from error
    after = _weight_bytes(str(output))
    _say(
        f"{output} holds {after / _MIB:,.1f} MiB of weights, of {before / _MIB:,.1f} MiB before, "
        f"after {time.monotonic() - began_s:.0f} s"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"hpc-serve: {text}\n")
    sys.stderr.flush()


def _run(options: argparse.Namespace, partial: Path, texts: list[str]) -> None:
    try:
        from llmcompressor import oneshot
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise CannotQuantizeError(
            f"the environment {sys.prefix} has no llm-compressor ({error}): "
            "pip install -r envs/quantize/requirements.txt in it, or name another with --venv."
        ) from error
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", **_OWN_CODE)
    tokenizer = AutoTokenizer.from_pretrained(options.model, **_OWN_CODE)
    _say(f"loaded {options.model}; {len(texts)} texts for calibration")
    with_texts = {"dataset": _dataset(texts, tokenizer, options.max_tokens), "num_calibration_samples": len(texts)}
    oneshot(
        model=model,
        recipe=_recipe(options.scheme, calibrated=bool(texts)),
        **({**with_texts, "max_seq_length": options.max_tokens} if texts else {}),
    )
    model.save_pretrained(partial, save_compressed=True)
    tokenizer.save_pretrained(partial)


def _recipe(scheme: str, *, calibrated: bool) -> list[Any]:
    """Return llm-compressor's modifiers: plain rounding, or with texts its W8A8 recipe (SmoothQuant, then GPTQ)."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    named: dict[str, Any] = {"targets": "Linear", "scheme": scheme, "ignore": list(IGNORED)}
    if not calibrated:
        return [QuantizationModifier(**named)]
    return [SmoothQuantModifier(smoothing_strength=_SMOOTHING), GPTQModifier(**named)]


def _dataset(texts: list[str], tokenizer: Any, max_tokens: int) -> Any:
    from datasets import Dataset

    read = [tokenizer(text, truncation=True, max_length=max_tokens, add_special_tokens=True) for text in texts]
    return Dataset.from_list([{"input_ids": one["input_ids"], "attention_mask": one["attention_mask"]} for one in read])


def read_texts(path: str, samples: int) -> Iterator[str]:
    """Yield the first texts of a JSONL file: `text`, `prompt`, or the contents of `messages` of each line.

    Raises CannotQuantizeError, naming the line.
    """
    found = 0
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if found == samples:
                    return
                if line.strip():
                    yield _text_of(json.loads(line), f"{path}:{number}")
                    found += 1
    except (OSError, ValueError, RecursionError) as error:
        raise CannotQuantizeError(f"{path} cannot be read as JSONL: {error}") from error
    if not found:
        raise CannotQuantizeError(f"{path} holds no texts.")


def _text_of(entry: Any, where: str) -> str:
    if isinstance(entry, dict):
        for key in ("text", "prompt"):
            if isinstance(entry.get(key), str) and entry[key]:
                return str(entry[key])
        messages = entry.get("messages")
        if isinstance(messages, list):
            contents = [one.get("content") for one in messages if isinstance(one, dict)]
            if text := "\n".join(content for content in contents if isinstance(content, str)):
                return text
    raise CannotQuantizeError(f'{where} has no text: write {{"text": …}}, {{"prompt": …}} or {{"messages": …}} a line.')


def copy_other_files(model: Path, output: Path) -> None:
    """Copy the files that are no weights and were not written anew: processors, chat templates, licences."""
    weights = {path for pattern in _WEIGHTS for path in model.glob(pattern)}
    for path in model.iterdir():
        if path.name == _ARGS_FILE or path in weights:
            continue
        if path.is_file() and not (output / path.name).exists():
            # With its mode: behind a link in a model of others may lie what you alone can read.
            shutil.copy(path, output / path.name)


def _weight_bytes(folder: str) -> int:
    return sum(path.stat().st_size for pattern in _WEIGHTS[:-1] for path in Path(folder).glob(pattern))


def _check_room(folder: Path, weight_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < weight_bytes * 0.6:
        raise CannotQuantizeError(
            f"{folder} has {free / _GIB:.1f} GiB free, and the quantised weights take about "
            f"{weight_bytes * 0.55 / _GIB:.1f} GiB: make room, or name another folder with --output.",
            _NO_ROOM,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpc_serve.quantize.program")
    parser.add_argument("--model", required=True, help="the folder of the model")
    parser.add_argument("--output", required=True, help="the folder that is made")
    parser.add_argument("--scheme", required=True, help="llm-compressor's name of it: INT8, FP8_DYNAMIC")
    parser.add_argument("--calibration", help="a JSONL file of texts")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=2048)
    return parser


if __name__ == "__main__":
    sys.exit(main())
