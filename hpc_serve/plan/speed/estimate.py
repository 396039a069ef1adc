"""How fast a layout serves: time to the first token, time between tokens, tokens per second, and what limits them.

Every figure is given twice: ideally, which no engine can beat, and as expected of a real engine by `Factors`. step.py
decides how long a step takes, steady.py, burst.py and decode.py how requests that arrive so share steps. This module
decides how many run at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.memory.kv_cache import cache_layout
from hpc_serve.plan.speed.burst import burst_speed
from hpc_serve.plan.speed.classes import case_of, speed_range
from hpc_serve.plan.speed.decode import decode_speed
from hpc_serve.plan.speed.measured import Correction
from hpc_serve.plan.speed.steady import steady_speed
from hpc_serve.plan.speed.step import EXPECTED, IDEAL, Factors, Roofline
from hpc_serve.plan.speed.traffic import Speed, Traffic


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """The speed of one replica under some traffic.

    At once, `batch` of the requests in flight run, and the others wait. The cache holds `capacity` of them. `is_ideal`:
    a person asked for the ideal figures alone. `measured` are runs here, by which `expected` and `factors` are
    corrected.
    """

    roofline: Roofline
    traffic: Traffic
    batch: float
    capacity: float
    ideal: Speed
    expected: Speed
    factors: Factors
    usd_per_gpu_hour: float | None = None
    is_ideal: bool = False
    measured: Correction | None = None

    @property
    def speed(self) -> Speed:
        """The figures that are asked for: the expected ones, or the ideal ones."""
        return self.ideal if self.is_ideal else self.expected

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return self.roofline.layout.num_gpus

    @property
    def output_tokens_per_s_per_gpu(self) -> float:
        """Output tokens per second of each GPU."""
        return self.speed.output_tokens_per_s / self.num_gpus

    @property
    def output_tokens_per_usd(self) -> float | None:
        """Output tokens for a dollar. None without a price."""
        if not self.usd_per_gpu_hour:
            return None
        return self.output_tokens_per_s_per_gpu * 3600 / self.usd_per_gpu_hour


@dataclass(frozen=True, kw_only=True)
class ReplicaSpeeds:
    """The speeds of one replica for any number of requests in flight, whose lengths and arrivals are `traffic`'s.

    `memory` is that of the layout. `is_ideal`: a person asked for the ideal figures alone.
    """

    roofline: Roofline
    traffic: Traffic
    memory: MemoryEstimate
    usd_per_gpu_hour: float | None = None
    is_ideal: bool = False

    def at(self, concurrency: int, factors: Factors = EXPECTED) -> SpeedEstimate:
        """Return the speed with so many requests in flight.

        Requests that the cache or vLLM's max_num_seqs cannot hold wait. The requests in flight are divided among the
        data-parallel ranks. Ranks step together, so a step is that of the fullest one.
        """
        roofline, traffic = self.roofline, replace(self.traffic, concurrency=concurrency)
        capacity = requests_held(roofline, traffic, self.memory)
        batch = running_requests(roofline, traffic, capacity)
        measured = _correction(roofline, traffic, batch)
        if measured is not None:
            factors = factors.times(measured.ratio)
        return SpeedEstimate(
            roofline=roofline,
            traffic=traffic,
            batch=batch,
            capacity=roofline.layout.data_parallel_size * capacity,
            ideal=speed_column(roofline, traffic, batch, IDEAL),
            expected=speed_column(roofline, traffic, batch, factors),
            factors=factors,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            is_ideal=self.is_ideal,
            measured=measured,
        )

    def held(self) -> int:
        """Return the most requests of the traffic's mean length that run at once: by the cache, and by max_num_seqs."""
        roofline = self.roofline
        of_rank = min(requests_held(roofline, self.traffic, self.memory), roofline.max_num_seqs)
        return max(1, int(roofline.layout.data_parallel_size * of_rank))

    def for_table(self) -> list[SpeedEstimate]:
        """Return the speeds for one request in flight, powers of four, the number asked for, and as many as are
        held."""
        held = self.held()
        counts = {1, held, *(size for size in (4, 16, 64, 256) if size < held)}
        if self.traffic.concurrency > 1:
            counts.add(self.traffic.concurrency)
        return [self.at(count) for count in sorted(counts)]


def _correction(roofline: Roofline, traffic: Traffic, batch: float) -> Correction | None:
    """Return what runs that were measured here say of a speed. None if there are no such runs."""
    if roofline.measured is None or not roofline.measured.runs:
        return None
    published = speed_range(roofline, traffic)
    return roofline.measured.correction(
        case_of(roofline, traffic, batch), published["measured_by_printed"] if published else None
    )


def requests_held(roofline: Roofline, traffic: Traffic, memory: MemoryEstimate) -> float:
    """Return how many requests of the traffic's mean length the cache of one data-parallel rank holds at once."""
    engine = roofline.engine
    ranks = roofline.layout.tensor_parallel_size
    layout = cache_layout(roofline.model, engine, ranks, kind=roofline.accelerator.kind)
    length = math.ceil(traffic.mean_context)
    blocks = layout.blocks_per_request(length, roofline.max_num_batched_tokens)
    return max(0, memory.num_blocks - 1) / blocks if blocks else math.inf


def running_requests(roofline: Roofline, traffic: Traffic, capacity: float) -> float:
    """Return how many of the requests in flight run at once: as many as the ranks' caches hold and max_num_seqs allows.

    `capacity` is that of one data-parallel rank.
    """
    of_rank = max(1.0, min(capacity, roofline.max_num_seqs))
    return min(float(traffic.concurrency), roofline.layout.data_parallel_size * of_rank)


def speed_column(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """Return one column of an estimate, by the formula for the arrival of requests. `batch` of them can run.

    The requests are divided among the data-parallel ranks. Ranks step together, so a step is that of the fullest one.
    """
    ranks = roofline.layout.data_parallel_size
    each = replace(traffic, concurrency=-(-traffic.concurrency // ranks))
    fullest = float(each.concurrency) if batch >= traffic.concurrency else batch / ranks
    arrives_at_once = traffic.arrivals == "burst"
    formula = decode_speed if traffic.decode_only else burst_speed if arrives_at_once else steady_speed
    speed = formula(roofline, each, fullest, factors)
    share = batch / fullest
    rate, tokens_per_s = share * speed.requests_per_s, share * speed.output_tokens_per_s
    return replace(speed, requests_per_s=rate, output_tokens_per_s=tokens_per_s)
