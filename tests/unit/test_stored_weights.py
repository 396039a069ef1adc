"""What the files of a model's weights say beside its config: headers and indexes, as far as they can be believed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.hub import find_spec, stored_weights
from hpc_serve.plan.model.checkpoint import StoredTensor, StoredWeights, loaded_bytes
from tests.unit.test_hub import tiny

assert tiny  # a fixture


def safetensors(file: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    file.write_bytes(with_header(header))


def test_headers_of_weights(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    safetensors(tmp_path / "a.safetensors", {"x": ("BF16", [4, 8], 64), "y": ("F32", [3], 12)})
    safetensors(tmp_path / "b.safetensors", {"z": ("F8_E4M3", [16, 16], 256)})
    assert stored_weights(tmp_path).tensors == (
        StoredTensor(name="x", dtype="BF16", elements=32, size_bytes=64),
        StoredTensor(name="y", dtype="F32", elements=3, size_bytes=12),
        StoredTensor(name="z", dtype="F8_E4M3", elements=256, size_bytes=256),
    )


def tiny_tensors(dtype: str = "BF16", size: int = 2) -> dict[str, tuple[str, list[int], int]]:
    shapes = {"model.embed_tokens.weight": [512, 256], "model.norm.weight": [256], "lm_head.weight": [512, 256]}
    for layer in range(5):  # the last is beyond the config: multi-token prediction, which vLLM does not load
        for names, shape in (
            (("self_attn.q_proj", "self_attn.o_proj"), [256, 256]),
            (("self_attn.k_proj", "self_attn.v_proj"), [128, 256]),
            (("mlp.gate_proj", "mlp.up_proj"), [512, 256]),
            (("mlp.down_proj",), [256, 512]),
            (("input_layernorm", "post_attention_layernorm"), [256]),
        ):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name in names}
    return {name: (dtype, shape, math.prod(shape) * size) for name, shape in shapes.items()}


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F32", 4)])
def test_files_that_agree_with_the_config(tiny: Path, dtype: str, size: int) -> None:
    """A tied head and a further layer are in the files and not loaded; 32 bit becomes 16."""
    safetensors(tiny / "model.safetensors", tiny_tensors(dtype, size))
    found, spec, _ = find_spec(str(tiny))
    assert found.warning is None
    assert spec.weight_bytes == 2 * spec.parameters == 2 * (512 * 256 + 4 * (9 * 256 * 256 + 512) + 256)


def test_files_that_are_heavier_are_believed(tiny: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.0.extra"] = ("BF16", [512, 1024], 512 * 1024 * 2)
    safetensors(tiny / "model.safetensors", tensors)
    found, spec, _ = find_spec(str(tiny))
    assert "the plan uses the size of the files" in str(found.warning)
    assert spec.weight_bytes == pytest.approx(2 * (2_493_696 + 512 * 1024), rel=0.03)


def test_an_index_without_its_files_decides_too(tiny: Path) -> None:
    names = dict.fromkeys(("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"), "a.safetensors")
    weight_bytes = 2 * find_spec(str(tiny))[1].parameters

    def warning(total: object, *, extra: str = "model.norm.weight") -> str | None:
        index = {"metadata": {"total_size": total}, "weight_map": {**names, extra: "a.safetensors"}}
        (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
        return find_spec(str(tiny))[0].warning

    assert warning(weight_bytes) is None
    assert "the plan uses the size of the files" in str(warning(2 * weight_bytes))
    assert warning(2 * weight_bytes, extra="model.layers.7.mlp.up_proj.weight") is None  # not loaded, of unknown size
    for nonsense in (None, "x", -1, True, [1]):
        assert warning(nonsense) is None


def test_scales_that_bitsandbytes_quantized_twice_are_loaded_in_32_bit() -> None:
    spec = find_spec("8b")[1]
    stored = {"": ("U8", 512), ".absmax": ("U8", 16), ".quant_state.bitsandbytes__nf4": ("U8", 90)}
    stored |= {".nested_absmax": ("F32", 1), ".nested_quant_map": ("F32", 256), ".quant_map": ("F32", 16)}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = [
        StoredTensor(name=f"{name}{end}", dtype=dtype, elements=count, size_bytes=count * (4 if dtype == "F32" else 1))
        for end, (dtype, count) in stored.items()
    ]
    assert loaded_bytes(tensors, spec) == 512 + 4 * 16


def test_an_index_whose_files_are_not_all_there(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", {"x": ("BF16", [4], 8)})
    index = {"weight_map": {"x": "a.safetensors", "y": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_weights(tmp_path) == StoredWeights(names=("x", "y"))


def with_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text  # the header alone: weights are never read


INDEX = "model.safetensors.index.json"
WRONG_ENTRIES: tuple[Any, ...] = ({}, [], {"dtype": "BF16", "shape": [4], "data_offsets": [0]}, {"dtype": "BF16"})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *(
            ("a.safetensors", content, r"a\.safetensors")
            for content in (b"", b"\xff" * 16, b"\5" + b"\0" * 7 + b'{"a":')
        ),
        *(("a.safetensors", with_header({"x": entry}), "is damaged: .* what 'x' is") for entry in WRONG_ENTRIES),
        *(
            (INDEX, json.dumps({"weight_map": {"x": name}}).encode(), "not below the model's folder")
            for name in ("../outside.safetensors", "/etc/passwd")
        ),
        *((INDEX, content, "no weight_map") for content in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"x": 3}}')),
    ],
)
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"mine")
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=says):
        stored_weights(folder)
