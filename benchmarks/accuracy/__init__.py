"""Studies that compare the plan with published runs, with engines that were measured, and with the scaling book.

Each study is a module that prints a table: `python -m benchmarks.accuracy.memory_cases`, `… .speed_cases`,
`… .scaling_book`.
"""

from pathlib import Path

DATA = Path(__file__).parent / "data"
