"""The line "Rendered by" of a script gives the same script, to the byte."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest

from hpc_serve.cli.main import run

SITE = """
gpu: a100-80gb
gpus_per_node: 4
time: 24:00:00
signal: B:USR1@600
partition: main
requeue: true
exclusive: true
sbatch_extra: [--mail-type=END]
stage: /local scratch
log_dir: {folder}/logs
env: {{HF_HOME: /data/hf, WORDS: "it's one of $$5"}}
modules: [cuda/12]
models: {folder}/models.yaml
"""
MODELS = """
- name: mine
  model: 8b
  vllm_args: [--max-num-seqs, 64, --max-model-len, 8192]
  env: {NCCL_DEBUG: INFO}
"""
# Words that may be added; of each line at most one.
CHOICES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("--name", "x.1"), ("--service", "a-b")),
    (("--gpu", "h100-80gb"), ("--gpu", "mi300x"), ("--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB")),
    (("--replicas", "3"), ("--replicas", "1:4"), ("--chain", "3", "--time", "8:00:00", "--overlap", "45m")),
    (("--idle-stop", "1.5h"), ("--idle-stop", "1234567s"), ("--keep-up",)),
    (("--nodes", "2"), ("-tp", "2"), ("--gpus-per-node", "2")),
    (("--max-model-len", "auto"), ("--max-model-len", "8k"), ("--max-model-len", "4096")),
    (("--target", "tpot=50ms"), ("--concurrency", "4", "--arrivals", "burst", "--longest-output-tokens", "300")),
    (("--input-tokens", "500", "--output-tokens", "100"),),
    (("--backend", "mp"), ("--engine-restarts", "0"), ("--tools",)),
    (("--stage",), ("--no-stage",)),
    (("--time", "12:00:00"), ("--time", "1-00:00")),
    (("--signal", "B:USR1@120"), ("--signal", "B:USR1@90")),
    (("--partition", "gpu,long"), ("--account", "a[1]"), ("--qos", "q"), ("--job-name", "j")),
    (("--constraint", "a&b|c"), ("--nodelist", "n[1-3]"), ("--exclude", "n9"), ("--reservation", "r")),
    (("--exclusive",), ("--no-exclusive", "--cpus-per-task", "7", "--mem", "200G")),
    (("--requeue",), ("--no-requeue",)),
    (("--sbatch", "--gres=craynetwork:1", "--sbatch", "--hold"),),
    (("--env", "A=b c'd\"$e"), ("--env", "HF_HOME=/else")),
    (("--log-dir", "/tmp/a"), ("--log-dir", "logs")),
    (("--max-num-seqs", "32"), ("--", "-q", "fp8", "--kv-cache-memory-bytes", "4GiB"), ("--", "--seed", "1")),
)


def script_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """The script that `render` prints; None where it refuses the words."""
    code = run(["render", *words])
    printed = capsys.readouterr().out
    return printed if code == 0 else None


@pytest.mark.parametrize("has_site", [False, True])
def test_the_line_gives_the_same_script(has_site: bool, thinned, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    chance, rendered, site = random.Random(10), 0, tmp_path / "mine.yaml"
    if has_site:
        site.write_text(SITE.format(folder=tmp_path))
        (tmp_path / "models.yaml").write_text(MODELS)
    tries = thinned(range(80))
    for _ in tries:
        groups = chance.sample(CHOICES, chance.randint(1, 5))
        named = [word for group in sorted(groups, key=CHOICES.index) for word in chance.choice(group)]
        model = chance.choice(["8b", "70b", *(["mine"] if has_site else [])])
        words = ["--model", model, *(["--site", "mine.yaml"] if has_site else []), *named]
        script = script_of(words, capsys)
        if script is None:
            continue
        rendered += 1
        (line,) = re.findall(r"^# Rendered by hpc-serve [^:]*: hpc-serve render (.*)$", script, re.MULTILINE)
        assert script_of(shlex.split(line), capsys) == script, (words, line)
    assert rendered >= len(tries) * 3 // 8
