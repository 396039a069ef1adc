"""The tiny models that stand in for the large ones in tests; `python -m tests.support.models FOLDER` writes them."""

from __future__ import annotations

from pathlib import Path

from hpc_serve.demo_model import SHAPES, make_demo_model
from tests.support.arguments import given_words

if __name__ == "__main__":
    (target,) = given_words(__doc__, 1)
    for like in SHAPES:
        print(make_demo_model(Path(target) / like, like=like))
