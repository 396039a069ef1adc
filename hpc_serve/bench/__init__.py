"""Measure a service as its clients meet it: requests of a known shape, at a known pace.

    from hpc_serve.bench import Lengths, Pace, Sweep, BenchWorkload, measure

    load = BenchWorkload(lengths=Lengths(input_len=1000, output_len=100), count=100)
    for one in measure(Sweep(services=("405b",), workloads=(load,), paces=(Pace(max_concurrency=64),))):
        print(one.figures.output_rate)               # tokens per second

These modules are pure: `prompts` and `files` decide what is asked, and `answers`, `figures`, `notes`, `results`,
`report` and `page` what follows from the answers. `texts` asks the engines for tokens, `load` sends the requests,
`own_share` watches this program, `sweep` makes one run after the other.
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve.bench.measured import Measured
    from hpc_serve.bench.outcome import Pace
    from hpc_serve.bench.prompts import Lengths
    from hpc_serve.bench.sweep import Sweep, measure
    from hpc_serve.bench.workload import BenchWorkload

__all__ = ["BenchWorkload", "Lengths", "Measured", "Pace", "Sweep", "measure"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Lengths": "prompts",
            "Measured": "measured",
            "Pace": "outcome",
            **dict.fromkeys(("Sweep", "measure"), "sweep"),
            "BenchWorkload": "workload",
        },
    )
