"""How vLLM is told to read weights, and the reason that the log gives."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import options
from hpc_serve.vllm.load_strategy import STRATEGY, LoadStrategy, WeightsPlace, choose_strategy, foreseen_strategy

ALL = ("lazy", "eager", "prefetch", "torchao")
EAGER, PREFETCH = (STRATEGY, "eager"), (STRATEGY, "prefetch")


def weights(filesystem="gpfs", total=140, largest=5, free=500) -> WeightsPlace:
    sizes = {"total_bytes": total, "largest_bytes": largest, "available_bytes": free}
    return WeightsPlace(filesystem=filesystem, **{name: size * GIB for name, size in sizes.items()})


def chosen(*words: str, known=ALL, ranks=4, **place: Any) -> LoadStrategy:
    return choose_strategy(words, weights(**place), known=known, ranks_per_node=ranks)


def foreseen(*words: str, ranks=4, **place: Any) -> str:
    return foreseen_strategy(words, weights(free=0, **place), ranks_per_node=ranks)


@pytest.mark.parametrize(
    ("place", "args", "reason"),
    [
        *[
            ({"filesystem": network}, PREFETCH, f"prefetch: 140.0 GiB on {network}, 500.0 GiB of memory are free")
            for network in ("gpfs", "beegfs", "wekafs", "ceph", "fuse.juicefs")
        ],
        *[({"filesystem": known}, (), "prefetch, by vLLM itself") for known in ("nfs", "nfs4", "lustre")],
        *[
            ({"filesystem": local}, (), f"140.0 GiB on {local}, which is no network filesystem")
            for local in ("ext4", "xfs", "tmpfs", "overlay", "zfs", "unknown")
        ],
        *[
            ({"filesystem": any_, "free": 150}, EAGER, "memory that are free, and one file of 5.0 GiB a rank does")
            for any_ in ("gpfs", "nfs", "lustre")
        ],
        ({"free": 30}, (), "nor does one file for each of 4 ranks"),
        ({"free": 30, "ranks": 1}, EAGER, "140.0 GiB on gpfs do not fit into 90 % of the 30.0 GiB"),
        ({"known": ("lazy", "eager")}, (), "this vLLM has no strategy 'prefetch'"),
        ({"known": ()}, (), "this vLLM has no strategy 'prefetch'"),
    ],
)
def test_filesystem_and_memory_decide(place, args, reason):
    strategy = chosen(**place)
    assert strategy.args == args
    assert reason in strategy.reason


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((STRATEGY, "lazy"), "lazy, as its command says"),
        ((f"{STRATEGY}=eager",), "eager, as its command says"),
        (("--load-format", "runai_streamer"), "--load-format runai_streamer reads the files in its own way"),
        (("--load-format", "dummy"), "--load-format dummy reads"),
        (("--model-loader-extra-config", '{"enable_multithread_load": true}'), "--model-loader-extra-config is given"),
    ],
)
def test_what_a_person_gives_wins(words, reason):
    assert chosen(*words).args == ()
    assert reason in chosen(*words).reason


def test_before_the_job_the_memory_that_decides_is_told():
    told = "prefetch on nodes with 155.6 GiB of memory free, else eager with 40.0 GiB, else vLLM's default (lazy): "
    assert foreseen() == told + "140.0 GiB on gpfs"
    assert [chosen(free=free).args for free in (156, 155, 40, 39)] == [PREFETCH, EAGER, EAGER, ()]


def test_before_the_job_what_needs_no_memory_is_told_as_in_the_job():
    assert foreseen(filesystem="ext4") == chosen(filesystem="ext4").reason
    assert foreseen(STRATEGY, "lazy") == chosen(STRATEGY, "lazy").reason
    assert foreseen_strategy(("--load-format", "dummy"), None, ranks_per_node=1) == (
        "--load-format dummy reads the files in its own way"
    )
    assert foreseen(filesystem="lustre").startswith("prefetch, by vLLM itself, on nodes with 155.6 GiB")
    assert "eager" not in foreseen(total=140, largest=140)
    assert foreseen_strategy((), None, ranks_per_node=1).startswith("known once the job sees them")


def test_the_pinned_version_has_the_strategies_that_are_chosen():
    assert {"prefetch", "eager"} <= set(options()[STRATEGY].choices)
