"""Finds the lines of a file that are nearest to a question: python examples/embeddings.py SERVICE FILE "my question"

The service serves embeddings: hpc-serve submit Qwen/Qwen3-Embedding-8B -- --runner pooling
"""

import math
import sys
from pathlib import Path

from hpc_serve.client import connect


def similarity(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def main(service: str, file: Path, question: str) -> None:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    with connect(service) as client:
        told = client.embeddings.create(model=client.model, input=[question, *lines])
    asked, *known = [one.embedding for one in sorted(told.data, key=lambda one: one.index)]
    ranked = sorted(zip(lines, known, strict=True), key=lambda pair: -similarity(asked, pair[1]))
    for line, embedding in ranked[:5]:
        print(f"{similarity(asked, embedding):.3f}  {line}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
