"""The table of kinds of service: plan, submit, ready, client, gateway and bench, each run with real vLLM on CPUs.

The models are tiny and their weights random. Each cell is what happened: "ran", or the sentence of a refusal by name.
The test holds the cells to `EXPECTED`, and writes its rows of docs/evidence/kinds.md. `make kinds` runs this.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_serve.demo_model import make_demo_model
from tests.cluster import wait_for
from tests.e2e.test_real_kinds import OPTIONS, SIZES, SWITCH, write_silence, write_tokenizer, write_whisper

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"minutes of two cores ({SWITCH} is not 1): `make kinds`"),
]
COMMAND = str(Path(sys.executable).with_name("hpc-serve"))
PAGE = Path(__file__).parents[2] / "docs/evidence/kinds.md"
COLUMNS = ("plan", "submit", "ready", "client", "gateway", "bench")
RAN = "ran"
NO_PICTURES = "not run: vLLM's Gemma 3 needs torchvision, which envs/cpu leaves out"
REFUSED = {
    **dict.fromkeys(("embedder", "reranker", "classifier"), "generates no text"),
    "Whisper": "openai-audio",
}
"""The kinds that `bench` refuses, and a part of the sentence."""
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    # kind: route, body beside the model, the key of the answer
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "choices"),
    "completion only": ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "choices"),
    "vision": ("/v1/chat/completions", {"max_tokens": 3}, "choices"),
    "embedder": ("/v1/embeddings", {"input": ["hello", "you"]}, "data"),
    "reranker": ("/v1/rerank", {"query": "a", "documents": ["b", "cc"]}, "results"),
    "classifier": ("/classify", {"input": ["hello"]}, "data"),
    "Whisper": ("/v1/audio/transcriptions", {"language": "en", "max_completion_tokens": 3}, "text"),
}
ASK = """
import json, sys, hpc_serve.client
service, route, body, sound = sys.argv[1:]
client = hpc_serve.client.connect(service)
body = {"model": client.model, **json.loads(body)}
if sound:
    extra = {"max_completion_tokens": body.pop("max_completion_tokens")}
    answer = client.audio.transcriptions.create(file=open(sound, "rb"), extra_body=extra, **body)
    print(json.dumps({"text": answer.text}))
else:
    url = str(client.base_url).rstrip("/").removesuffix("/v1") + route
    print(json.dumps(client.post(url, body=body, cast_to=object)))
"""


def picture() -> str:
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def write_gemma(folder: Path) -> None:
    """Write a tiny Gemma 3 that reads pictures: 16 patches of a picture are four tokens."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    text = make_demo_model(folder.with_name("text-of-vision"))
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks.values()])
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=marks, **ends)
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}<boi>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    size = {"height": 56, "width": 56}
    processor: Any = Gemma3Processor
    processor(
        Gemma3ImageProcessorPil(size=size, image_seq_length=4),
        whole,
        chat_template=template,
        image_seq_length=4,
    ).save_pretrained(folder)
    ids = {name: whole.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "hidden_size": 128}
    config = Gemma3Config(
        text_config={**heads, "vocab_size": 520, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 128},
        vision_config={**heads, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        eos_token_id=whole.eos_token_id,
        bos_token_id=whole.bos_token_id,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def write_model(kind: str, folder: Path) -> None:
    from transformers import BertConfig, BertModel, XLMRobertaConfig, XLMRobertaForSequenceClassification

    if kind in ("chat", "completion only"):
        make_demo_model(folder)
        if kind == "completion only":
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    elif kind == "vision":
        write_gemma(folder)
    elif kind == "Whisper":
        write_whisper(folder)
    else:
        labels = {"reranker": 1, "classifier": 3}.get(kind)
        sized = {**SIZES, "max_position_embeddings": 514, "type_vocab_size": 1}
        model = (
            XLMRobertaForSequenceClassification(XLMRobertaConfig(**sized, num_labels=labels))
            if labels
            else BertModel(BertConfig(**SIZES, max_position_embeddings=512))
        )
        model.save_pretrained(folder)
        write_tokenizer(folder)


class World:
    """One home and one gateway for all kinds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "HPC_SERVE_HOME": str(folder / "home"), "HPC_SERVE_ENV": sys.prefix}
        self.socket = folder / "gateway.sock"
        write_silence(folder / "silence.wav")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, check=False, timeout=900)

    def said(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return that it ran, or what the error says."""
        if done.returncode == 0:
            return RAN
        told = " ".join(done.stderr.split())
        return re.sub(r"^.*?error: ", "", told)[:300].replace(str(self.folder), "…").replace("|", "\\|") or "failed"

    def through_gateway(self, kind: str, service: str, body: dict[str, Any]) -> str:
        route, _, key = ROUTES[kind]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), timeout=120) as client:
            if kind == "Whisper":
                sound = {"file": ("silence.wav", (self.folder / "silence.wav").read_bytes())}
                answer = client.post(f"http://localhost{route}", data={"model": service, **body}, files=sound)
            else:
                answer = client.post(f"http://localhost{route}", json={"model": service, **body})
        return RAN if answer.status_code == 200 and key in answer.json() else answer.text[:300]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("kinds"))
    gateway = subprocess.Popen(
        [COMMAND, "gateway", "--socket", str(world.socket)],
        env=world.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(world.socket.exists, 60, what="the gateway's socket")
        yield world
    finally:
        gateway.terminate()
        gateway.wait()


def write_row(kind: str, cells: dict[str, str]) -> None:
    PAGE.write_text(page(kind, cells, PAGE.read_text() if PAGE.exists() else ""))


def page(kind: str, cells: dict[str, str], before: str) -> str:
    """Return the page with this kind's row. The other rows stay as they were."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
    rows[kind] = f"| {kind} | `{ROUTES[kind][0]}` | {' | '.join(cells[one] for one in COLUMNS)} |"
    return "\n".join(
        [
            "# Kinds of service",
            "",
            "<!-- not run: minutes -->",
            "```bash",
            "make kinds",
            "```",
            "",
            "`tests/e2e/test_real_kinds_table.py` wrote this table, on one machine without Slurm. The models are tiny,",
            "and their weights random. Each cell is what happened: it ran, or the sentence that refused it. `ready` is",
            "the service's own first request. Client and gateway sent the route of the second column.",
            f"vLLM {version} on CPUs.",
            "",
            f"| kind | route | {' | '.join(COLUMNS)} |",
            f"|---|---|{'---|' * len(COLUMNS)}",
            *(rows[one] for one in ROUTES if one in rows),
            "",
        ]
    )


@pytest.mark.parametrize("kind", ROUTES)
def test_a_kind_is_planned_started_asked_and_measured_or_refused_by_name(kind: str, world: World) -> None:
    folder, service = world.folder / kind.replace(" ", "-"), kind.replace(" ", "-").lower()
    write_model(kind, folder)
    route, body, key = ROUTES[kind]
    if kind == "vision":
        parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "what is it"}]
        body = {**body, "messages": [{"role": "user", "content": parts}]}
    cells = dict.fromkeys(COLUMNS, "not run")
    cells["plan"] = world.said(world.run(COMMAND, "plan", str(folder), "--gpu", "cpu", "--gpu-memory", "4GiB"))
    if kind == "vision" and importlib.util.find_spec("torchvision") is None:
        cells["submit"] = NO_PICTURES
        write_row(kind, cells)
        assert cells["plan"] == RAN
        return
    try:
        started = world.run(COMMAND, "submit", "--model", str(folder), "--service", service, *OPTIONS)
        cells["submit"] = world.said(started)
        assert cells["submit"] == RAN, started.stderr[-3000:]
        cells["ready"] = RAN if f"{service} is ready" in started.stderr else "not ready"
        sound = str(world.folder / "silence.wav") if kind == "Whisper" else ""
        asked = world.run(sys.executable, "-c", ASK, service, route, json.dumps(body), sound)
        cells["client"] = RAN if asked.returncode == 0 and key in json.loads(asked.stdout) else asked.stderr[-300:]
        cells["gateway"] = world.through_gateway(kind, service, body)
        few = ("--lengths", "8/8", "--num-prompts", "2", "--max-concurrency", "1")
        cells["bench"] = world.said(world.run(COMMAND, "bench", service, *few))
    finally:
        world.run(COMMAND, "stop", service)
        write_row(kind, cells)
    for column, cell in cells.items():
        wanted = REFUSED.get(kind, RAN) if column == "bench" else RAN
        assert wanted in cell if wanted != RAN else cell == RAN, f"{column}: {cell}"
