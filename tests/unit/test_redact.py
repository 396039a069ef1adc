"""No secret stays in a text that leaves the cluster; what tells of the failure does."""

from __future__ import annotations

import base64

import pytest

from hpc_serve.redact import HIDDEN, redact, secrets_of

PEM = "-----BEGIN PRIVATE KEY-----\nMIIBVwIBADANBgkqhkiG\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=planted",
        "export HF_TOKEN='planted'",
        "hub said: planted-hf_abcdefghijklmnopqrstuvwxyz",
        "Authorization: Bearer planted",
        "curl -H 'Authorization: Bearer planted-0123456789' https://n1:8000/v1",
        '{"api_key": "planted", "model": "8b"}',
        "--api-key planted",
        "non-default args: {'model': '/m', 'hf_token': 'planted'}",
        "https_proxy=http://me:planted@proxy:3128",
        "AWS_SECRET_ACCESS_KEY=planted/planted+1",
        "password: planted12",
        "Set-Cookie: planted=1",
    ],
)
def test_a_secret_is_taken_out_by_its_name_or_its_form(text):
    assert "planted" not in redact(text.replace("planted-hf_", "hf_planted"))
    assert HIDDEN in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "bpVuxKVNTtd4AvXgxfp9FAE2KBMc2rKQIIH0CxPG0GY",
        "hrcrmV6h9aVOOycU-1epzqBB_dMHfGVQtMdFRYfE5-Q",
        "KOQJASaUHCBKUoESPnTxidMvBCcgKfuuSvVHe-INwAo",  # no digit: one in 1,500 keys
        "90b983d31126e09b033a4e91d2b82bca345bafeeb1f21807ffcf7ec56bec65c3",
        PEM,
        PEM.replace("PRIVATE KEY", "CERTIFICATE"),
        PEM.rpartition("\n")[0],
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc",
        "sk-proj-0123456789abcdef",
    ],
)
def test_what_looks_like_a_key_is_taken_out(text):
    assert redact(f"before {text}\n").strip() == f"before {HIDDEN}"


@pytest.mark.parametrize(
    "text",
    [
        "GPU KV cache size: 410,128 tokens, Maximum concurrency for 131,072 tokens per request: 3.13x",
        "tokenizer='/scratch/models/8b', tokenizer_mode=auto, skip_tokenizer_init=False",
        "max_num_batched_tokens=8192 prompt_token_ids: [1, 2, 3]",
        "the token was refused",
        "a process came to Ray without the run's token, or with another one",
        "RAY_AUTH_TOKEN_PATH=/home/u/.hpc-serve/jobs/7/ray_token",
        "--ssl-keyfile /home/u/.hpc-serve/services/8b/key.pem",
        "KeyError: 'model.layers.0.self_attn.qkv_proj.weight'",
        "models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
        'File "/env/lib/python3.11/site-packages/vllm/v1/engine/core.py", line 1510, in run_engine_core',
    ],
)
def test_what_tells_of_the_failure_stays(text):
    assert redact(text) == text


def test_a_value_that_is_known_is_taken_out_wherever_it_stands():
    key = 'plain"words'
    assert redact(f'x{key}y and {{"it": "plain\\"words"}}', [key, ""]) == (f'x{HIDDEN}y and {{"it": "{HIDDEN}"}}')


def test_secrets_of_an_environment_are_known_by_their_names():
    environ = {"HF_TOKEN": "a1", "OPENAI_API_KEY": "b2", "DB_PASS": "c3", "HOME": "/home/u", "MAX_TOKENS": "100"}
    assert sorted(secrets_of(environ)) == ["a1", "b2", "c3"]
    assert base64.b64encode(b"x" * 60).decode() not in redact(f"token: {base64.b64encode(b'x' * 60).decode()}")


@pytest.mark.parametrize("text", ["a" * 300_000, "-" * 300_000, "a.b-c_" * 50_000, "token " * 50_000])
def test_a_long_line_without_blanks_takes_no_more_than_its_length(text):
    assert redact(text) == text
