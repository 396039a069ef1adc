"""An embedder and a reranker with real vLLM on CPUs, started on this machine without Slurm: ready, asked, stopped.

The models are tiny and their weights random, so no figure says anything; which requests are answered is real. Two
engines take some minutes of two cores: `make kinds` runs this, `make test` skips it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SWITCH = "HPC_SERVE_REAL_KINDS"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"minutes of two cores ({SWITCH} is not 1): `make kinds`"),
]

SIZES = {
    **{"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 256, "pad_token_id": 0},
}
OPTIONS = (
    *("--cluster", "local", "--gpu", "cpu", "--gpu-memory", "4GiB", "--wait"),
    *("--", "--dtype", "float32", "--max-num-seqs", "8", "--enforce-eager"),
)
ASK = """
import json, hpc_serve.client
embedder, reranker = (hpc_serve.client.connect(name) for name in ("embed", "rerank"))
vectors = embedder.embeddings.create(model=embedder.model, input=["hello", "you"]).data
body = {"model": reranker.model, "query": "a", "documents": ["b", "cc"]}
ranked = reranker.post("/rerank", body=body, cast_to=object)["results"]
print(json.dumps([[len(one.embedding) for one in vectors], len(ranked)]))
"""


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=510, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    from transformers import BertConfig, BertModel, XLMRobertaConfig, XLMRobertaForSequenceClassification

    folder = tmp_path_factory.mktemp("models")
    reranker = XLMRobertaConfig(**SIZES, max_position_embeddings=514, type_vocab_size=1, num_labels=1)
    made = {
        "embed": BertModel(BertConfig(**SIZES, max_position_embeddings=512)),
        "rerank": XLMRobertaForSequenceClassification(reranker),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name)
    return {name: folder / name for name in made}


def output(words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


def test_an_embedder_and_a_reranker_are_ready_answer_and_have_no_chat(models, tmp_path):
    environ = {**os.environ, "HPC_SERVE_HOME": str(tmp_path / "home"), "HPC_SERVE_ENV": sys.prefix}
    command = str(Path(sys.executable).with_name("hpc-serve"))
    started = {
        name: subprocess.Popen(
            [command, "submit", "--model", str(folder), "--service", name, *OPTIONS],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, folder in models.items()
    }
    try:
        for name, process in started.items():
            _, told = process.communicate(timeout=900)
            assert process.returncode == 0, told
            assert f"{name} is ready" in told
            assert "It generates no text." in told
        asked = output([sys.executable, "-c", ASK], environ)
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout) == [[128, 128], 2]
        chat = output([command, "chat", "rerank", "hi"], environ)
        assert "generates no text" in chat.stderr
        assert '"/rerank"' in chat.stderr
    finally:
        for name in started:
            subprocess.run([command, "stop", name], env=environ, check=False)
