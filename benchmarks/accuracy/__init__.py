"""What scores the plan against the world: published runs, engines that were measured, and the scaling book's chapter.

Each study is a module that prints its table: `python -m benchmarks.accuracy.memory_cases`, `… .speed_cases`,
`… .scaling_book`.
"""

from pathlib import Path

DATA = Path(__file__).parent / "data"
