"""Embedder, reranker and Whisper with real vLLM on CPUs, started on this machine without Slurm: ready, asked, stopped.

The models are tiny and their weights random, so no figure says anything; which requests are answered is real. Three
engines take some minutes of two cores: `make kinds` runs this, `make test` skips it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

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


WHISPER = {
    **{"d_model": 128, "num_mel_bins": 80, "begin_suppress_tokens": None},
    **{f"{half}_layers": 2 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 256 for half in ("encoder", "decoder")},
}
TRANSCRIBE = """
import json, sys, hpc_serve.client
client = hpc_serve.client.connect("hear")
asked = {"model": client.model, "language": "en", "extra_body": {"max_completion_tokens": 3}}
whole = client.audio.transcriptions.create(file=open(sys.argv[1], "rb"), **asked)
stream = client.audio.transcriptions.create(file=open(sys.argv[1], "rb"), stream=True, **asked)
words = [event.choices[0]["delta"]["content"] for event in stream]
print(json.dumps([whole.usage.seconds, whole.text, "".join(words)]))
"""


def write_whisper(folder: Path) -> None:
    """Write a tiny Whisper with random weights. Its tokens are bytes, and the special ones that vLLM asks with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    names = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "notimestamps")
    special = [f"<|{name}|>" for name in names]
    vocabulary = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), special[0])
    processor: Any = WhisperProcessor
    processor(
        WhisperFeatureExtractor(feature_size=80), WhisperTokenizerFast(tokenizer_object=tokenizer, **end)
    ).save_pretrained(folder)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocabulary[special[0]])
    start = vocabulary[special[1]]
    config = WhisperConfig(vocab_size=len(vocabulary), decoder_start_token_id=start, **ends, **WHISPER)
    model = WhisperForConditionalGeneration(config)
    unsaid = [index for token, index in vocabulary.items() if not (token.isascii() and token.isalpha())]
    model.model.decoder.embed_tokens.weight.data[unsaid] = 0
    model.save_pretrained(folder)


def write_silence(file: Path) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(2 * 16_000))


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


def test_whisper_is_ready_transcribes_and_has_no_chat(tmp_path):
    write_whisper(tmp_path / "whisper")
    write_silence(tmp_path / "silence.wav")
    environ = {**os.environ, "HPC_SERVE_HOME": str(tmp_path / "home"), "HPC_SERVE_ENV": sys.prefix}
    command = str(Path(sys.executable).with_name("hpc-serve"))
    try:
        started = output(
            [command, "submit", "--model", str(tmp_path / "whisper"), "--service", "hear", *OPTIONS], environ
        )
        assert started.returncode == 0, started.stderr
        assert "hear is ready" in started.stderr
        assert "It transcribes audio: `client.audio.transcriptions.create" in started.stderr
        asked = output([sys.executable, "-c", TRANSCRIBE, str(tmp_path / "silence.wav")], environ)
        assert asked.returncode == 0, asked.stderr
        seconds, text, streamed = json.loads(asked.stdout)
        assert seconds == 1
        assert text == streamed != ""
        assert "client.audio.transcriptions.create" in output([command, "chat", "hear", "hi"], environ).stderr
        measured = output([command, "bench", "hear", "--dataset-name", "chat", "--lengths", "8/8"], environ)
        assert "openai-audio" in measured.stderr
    finally:
        subprocess.run([command, "stop", "hear"], env=environ, check=False)
