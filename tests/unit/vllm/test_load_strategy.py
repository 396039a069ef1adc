"""How vLLM is told to read weights, and the reason that the log gives."""

from __future__ import annotations

import pytest

from hpc_serve.sizes import GIB
from hpc_serve.vllm.load_strategy import STRATEGY, LoadStrategy, WeightsPlace, choose_strategy, foreseen_strategy
from hpc_serve.vllm.options import options

ALL = ("lazy", "eager", "prefetch", "torchao")


def chosen(*words: str, filesystem="gpfs", total=140, largest=5, free=500, known=ALL, ranks=4) -> LoadStrategy:
    place = WeightsPlace(
        filesystem=filesystem, total_bytes=total * GIB, largest_bytes=largest * GIB, available_bytes=free * GIB
    )
    return choose_strategy(words, place, known=known, ranks_per_node=ranks)


@pytest.mark.parametrize("filesystem", ["gpfs", "beegfs", "wekafs", "ceph", "fuse.juicefs"])
def test_a_network_filesystem_that_vllm_does_not_know_is_read_ahead(filesystem):
    strategy = chosen(filesystem=filesystem)
    assert strategy.args == (STRATEGY, "prefetch")
    assert strategy.reason == f"prefetch: 140.0 GiB on {filesystem}, 500.0 GiB of memory are free"


@pytest.mark.parametrize("filesystem", ["nfs", "nfs4", "lustre"])
def test_what_vllm_reads_ahead_by_itself_is_left_to_it(filesystem):
    assert chosen(filesystem=filesystem).args == ()
    assert "by vLLM itself" in chosen(filesystem=filesystem).reason


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "tmpfs", "overlay", "zfs", "unknown"])
def test_a_local_disk_is_left_to_vllm(filesystem):
    assert chosen(filesystem=filesystem).args == ()
    assert f"140.0 GiB on {filesystem}, which is no network filesystem" in chosen(filesystem=filesystem).reason


@pytest.mark.parametrize("filesystem", ["gpfs", "nfs", "lustre"])
def test_where_memory_does_not_hold_all_a_file_at_a_time_is_read(filesystem):
    strategy = chosen(filesystem=filesystem, free=150)
    assert strategy.args == (STRATEGY, "eager")
    assert "140.0 GiB" in strategy.reason
    assert "one file of 5.0 GiB a rank does" in strategy.reason


def test_where_memory_does_not_hold_a_file_for_each_rank_vllm_chooses():
    assert chosen(free=30).args == ()
    assert "nor does one file for each of 4 ranks" in chosen(free=30).reason
    assert chosen(free=30, ranks=1).args == (STRATEGY, "eager")


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


def foreseen(*words: str, filesystem="gpfs", total=140, largest=5, ranks=4) -> str:
    place = WeightsPlace(filesystem=filesystem, total_bytes=total * GIB, largest_bytes=largest * GIB, available_bytes=0)
    return foreseen_strategy(words, place, ranks_per_node=ranks)


def test_before_the_job_the_memory_that_decides_is_told():
    told = "prefetch on nodes with 155.6 GiB of memory free, else eager with 40.0 GiB, else vLLM's default (lazy): "
    assert foreseen() == told + "140.0 GiB on gpfs"
    assert chosen(free=156).args == (STRATEGY, "prefetch")
    assert chosen(free=155).args == chosen(free=40).args == (STRATEGY, "eager")
    assert chosen(free=39).args == ()


def test_before_the_job_what_needs_no_memory_is_told_as_in_the_job():
    assert foreseen(filesystem="ext4") == chosen(filesystem="ext4").reason
    assert foreseen(STRATEGY, "lazy") == chosen(STRATEGY, "lazy").reason
    assert foreseen_strategy(("--load-format", "dummy"), None, ranks_per_node=1) == (
        "--load-format dummy reads the files in its own way"
    )
    assert foreseen(filesystem="lustre").startswith("prefetch, by vLLM itself, on nodes with 155.6 GiB")
    assert "eager" not in foreseen(total=140, largest=140)
    assert foreseen_strategy((), None, ranks_per_node=1).startswith("known once the job sees them")


def test_a_version_without_the_strategy_is_not_asked_for_it():
    assert chosen(known=("lazy", "eager")).args == ()
    assert "this vLLM has no strategy 'prefetch'" in chosen(known=("lazy", "eager")).reason
    assert chosen(known=()).args == ()


def test_the_pinned_version_has_the_strategies_that_are_chosen():
    assert {"prefetch", "eager"} <= set(options()[STRATEGY].choices)
