"""What is read out of the commands' words, version by version."""

from __future__ import annotations

import pytest

from hpc_serve.submit.init.choose import gpus_named
from hpc_serve.submit.init.facts import (
    GpuKind,
    parse_associations,
    parse_config,
    parse_default_account,
    parse_df,
    parse_gres,
    parse_ip,
    parse_modules,
    parse_nodes,
    parse_partitions,
    parse_quota,
    with_nodes,
)
from tests.unit.submit.init.printed import DF, IP, LMOD, QUOTA, SLURM_24_11


@pytest.mark.parametrize(
    ("gres", "kinds"),
    [
        ("gpu:h100:8", [("h100", 8)]),
        ("gpu:8", [(None, 8)]),
        ("gpu:3090:4", [("3090", 4)]),
        ("gpu:nvidia_a100-sxm4-80gb:4(S:0,2-3)", [("nvidia_a100-sxm4-80gb", 4)]),
        ("gpu:a100:4(S:0-1),gpu:a30:2(S:1),shard:8", [("a100", 4), ("a30", 2)]),
        ("nvme:1,gpu:a100_1g.10gb:14", [("a100_1g.10gb", 14)]),
        ("gpu:h100:no_consume:8", [("h100", 8)]),
        ("(null)", []),
        ("mygpu:3", []),
        ("gpu:0", []),
    ],
)
def test_gpus_of_a_node(gres, kinds):
    assert parse_gres(gres) == tuple(GpuKind(name=name, count=count) for name, count in kinds)


@pytest.mark.parametrize(
    ("slurm_name", "features", "name"),
    [
        ("h100", (), "h100-80gb"),
        ("H100", (), "h100-80gb"),
        ("nvidia_h100_80gb_hbm3", (), "h100-80gb"),
        ("nvidia_h100_nvl", (), "h100-94gb"),
        ("nvidia_h100_pcie", (), "h100-pcie-80gb"),
        ("a100", ("icelake", "a100_40g"), "a100-40gb"),
        ("a100", ("80g", "ssd40gb"), "a100-80gb"),
        ("nvidia_a100-pcie-40gb", (), "a100-pcie-40gb"),
        ("tesla_v100-sxm2-16gb", (), "v100-16gb"),
        ("l40s", (), "l40s"),
        ("geforce_rtx_3090", (), "rtx-3090"),
        ("nvidia_gh200_480gb", (), "gh200-96gb"),
        ("amd_instinct_mi300x_oam", (), "mi300x"),
        ("mi250x", (), "mi250x-gcd"),
        ("a10", (), "a10"),
        ("a10g", (), "a10g"),
        ("a100_1g.10gb", (), None),
        ("l40", (), None),
        ("a6000", (), None),
        ("gtx1080ti", (), None),
        ("tesla", (), None),
    ],
)
def test_the_accelerator_that_a_site_means(slurm_name, features, name):
    assert next(iter(gpus_named(slurm_name, features)), None) == name


def test_what_a_name_leaves_open_is_said():
    assert gpus_named("v100") == ("v100-32gb", "v100-16gb")
    assert gpus_named("tesla_v100-sxm2-32gb") == ("v100-32gb",)


def test_partitions_and_nodes_of_24_11():
    found = with_nodes(parse_partitions(SLURM_24_11.partition), parse_nodes(SLURM_24_11.node))
    cpu, boost, vip, old = found
    assert (cpu.time_limit_s, cpu.gpu_nodes, cpu.gives_whole_nodes) == (None, (), False)
    assert (boost.gives_whole_nodes, boost.allow_qos) == (True, ("boost_prod", "boost_dbg"))
    assert [node.name for node in boost.nodes] == ["b001", "b002", "b003", "b004"]  # b005 is down
    assert (boost.nodes[0].cpus, boost.nodes[0].features) == (72, ("a100", "nvme"))  # not what the reason says
    assert (vip.allow_groups, old.is_up) == (("astro", "root"), False)


def test_the_login_node():
    home, scratch, tmp = parse_df(DF, ["/home/alice", "/scratch/alice", "/tmp"])
    assert (home.kind, home.is_shared, home.free_kib, home.mounted_on) == ("nfs4", True, 44857600, "/home")
    assert (scratch.is_shared, tmp.is_shared, tmp.kind) == (True, False, "tmpfs")
    assert parse_df(DF, ["/home/alice"]) == ()
    assert parse_ip(IP) == {"eno1": ("192.0.2.17/24",), "ib0": ("10.1.0.7/16",), "vlan7": ("198.51.100.4/24",)}
    assert parse_quota(QUOTA)["nas1:/export/home"] == 52428800 - 18000000
    assert parse_modules(LMOD) == ("apptainer/1.3.4", "cuda/12.4.0", "cuda/12.8.1", "gcc/13.2.0", "fftw/3.3.10")


@pytest.mark.parametrize("garbage", ["", "\n\n", "=", "NodeName", "|||", "a=b c", "error: \x00 gpu:x:y", "%" * 5000])
def test_words_that_are_not_understood_are_left_out(garbage):
    nothing = [parse_nodes(garbage), parse_partitions(garbage), parse_associations(garbage), parse_gres(garbage)]
    assert [*nothing, parse_df(garbage, ["/"])] == [()] * 5
    assert parse_ip(garbage) == {}
    assert parse_quota(garbage) == {}
    parse_config(garbage), parse_modules(garbage), parse_default_account(garbage)
