"""The tiny models that stand in for the large ones in tests; `python -m tests.support.models FOLDER` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_serve.demo_model import SHAPES, make_demo_model

if __name__ == "__main__":
    for like in SHAPES:
        print(make_demo_model(Path(sys.argv[1]) / like, like=like))
