"""Common English words for prompts. Most are one token of any tokenizer, and none is a special token."""

from __future__ import annotations

from importlib.resources import files

WORDS = files("hpc_serve.bench").joinpath("words.txt").read_text(encoding="ascii").split()
