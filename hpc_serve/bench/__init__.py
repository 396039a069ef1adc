"""Measure a service as its clients meet it: requests of a known shape, at a known pace.

    from hpc_serve.bench import Lengths, Pace, Sweep, BenchWorkload, measure

    load = BenchWorkload(lengths=Lengths(input_len=1000, output_len=100), count=100)
    for one in measure(Sweep(services=("405b",), workloads=(load,), paces=(Pace(max_concurrency=64),))):
        print(one["output_throughput"])              # tokens per second; all keys of `vllm bench serve --save-result`

`run` has the values of a run. `workload` makes its requests, `sweep` sends them, one run after the other, by the
connections of `service`. `results` says what came of a run, and `report` and `page` show that.
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve.bench.run import Lengths, Pace
    from hpc_serve.bench.sweep import Sweep, measure
    from hpc_serve.bench.workload import BenchWorkload

__all__ = ["BenchWorkload", "Lengths", "Pace", "Sweep", "measure"]

if not TYPE_CHECKING:
    _PLACES = {"Lengths": "run", "Pace": "run", "Sweep": "sweep", "measure": "sweep", "BenchWorkload": "workload"}
    __getattr__, __dir__ = lazy_names(__name__, _PLACES)
