"""What is read of the commands' words, what is decided of a site file and why, and what is left as a question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.submit.init.choose import choose_partition, choose_settings, describe, gpus_named
from hpc_serve.submit.init.facts import (
    ClusterFacts,
    GpuKind,
    PartitionFacts,
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
from hpc_serve.submit.init.places import site_text, yaml_value
from tests.unit.submit.init.printed import DF, IP, LMOD, QUOTA, SLURM_22_05, SLURM_24_11, Printed


def facts_of(printed: Printed, **more) -> ClusterFacts:
    return ClusterFacts(
        host="login1",
        groups=("users",),
        config=parse_config(printed.config),
        partitions=with_nodes(parse_partitions(printed.partition), parse_nodes(printed.node)),
        associations=parse_associations(printed.associations),
        default_account=parse_default_account(printed.default_account),
        **more,
    )


def settings_of(facts: ClusterFacts) -> dict:
    return {setting.key: setting for setting in choose_settings(facts)}


def decided(facts: ClusterFacts) -> dict:
    return {key: setting.value for key, setting in settings_of(facts).items() if setting.value is not None}


def test_a_plain_cluster():
    facts = facts_of(SLURM_22_05, environment="/home/alice/env", engine="0.32.0")
    assert decided(facts) == {"partition": "gpu", "gpu": "h100-80gb", "gpus_per_node": 8, "venv": "/home/alice/env"}
    assert describe(facts.partitions[0]) == "3 nodes of 8 h100, 64 CPUs, 512 GiB, at most 7 d"
    assert "Slurm's default. Also here: lowprio (3 nodes" in settings_of(facts)["partition"].why


LINE_ENDS = ("a\x85partition: evil", "a\u2028qos: evil")
HOSTILE = (*LINE_ENDS, "my project", "a;b", "$(id)", "\x9b31m", "\u202eevil", 'a"b', "{{x}}")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_no_script_can_hold_is_left_as_a_question(name, site_of):
    facts = facts_of(SLURM_22_05)
    associations = tuple(replace(one, account=name) for one in facts_of(SLURM_24_11).associations)
    partitions = tuple(replace(one, name=f"gpu{name}") for one in facts.partitions)
    facts = replace(facts, associations=associations, default_account=name, partitions=partitions)
    settings = choose_settings(facts)
    assert {"account", "partition"} <= {setting.key for setting in settings if setting.value is None}
    site = site_of(text := site_text(settings, head="of init"))
    assert (site.account, site.partition, site.qos) == (None, None, None)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_site_with_rules():
    facts = facts_of(SLURM_24_11)
    assert decided(facts) == {
        "partition": "boost",
        "account": "genom",
        "qos": "boost_prod",
        "time": "08:00:00",
        "gpu": "a100-80gb",
        "gpus_per_node": 4,
        "gres_type": "nvidia_a100-sxm4-80gb",
        "exclusive": True,
    }
    why = {key: setting.why for key, setting in settings_of(facts).items()}
    assert "not Slurm's default" in why["partition"]
    assert "vip" in why["partition"]
    assert "old" not in why["partition"]
    assert why["account"] == "Your default account, says sacctmgr. You may charge astro, lab too."
    assert "takes boost_prod, boost_dbg alone" in why["qos"]
    assert "nvidia_h100_80gb_hbm3" in why["gres_type"]
    assert "the nodes see" in why["venv"]
    assert "OverSubscribe=EXCLUSIVE" in why["exclusive"]
    assert "Slurm's TmpFS is /local" in why["tmpdir"]


def test_who_may_use_a_partition_decides():
    facts = facts_of(SLURM_24_11)
    vip = next(one for one in facts.partitions if one.name == "vip")
    only_vip = replace(facts, partitions=(vip,))
    assert choose_partition(only_vip) is None
    assert choose_partition(replace(only_vip, groups=("users", "astro"))) == vip
    boost = next(one for one in facts.partitions if one.name == "boost")
    barred = replace(boost, allow_accounts=("physics",))
    assert choose_partition(replace(facts, partitions=(barred,))) is None
    denied = replace(facts, partitions=(replace(boost, deny_accounts=("genom",)),))
    assert decided(denied)["account"] == "astro"


@pytest.mark.parametrize("select", ["select/linear", "select/cons_res"])
def test_an_old_scheduler_is_asked_by_gres(select):
    facts = facts_of(SLURM_22_05)
    facts = replace(facts, config={**facts.config, "SelectType": select})
    assert decided(facts)["gpu_directive"] == "gres"
    assert select in settings_of(facts)["gpu_directive"].why


def test_jobs_that_cannot_submit_are_known_by_their_partition():
    facts = facts_of(SLURM_22_05)
    gpu = replace(facts.partitions[0], submit_hosts="login[1-4]")
    facts = replace(facts, partitions=(gpu,))
    assert decided(facts)["jobs_can_submit"] is False
    assert "login[1-4]" in settings_of(facts)["jobs_can_submit"].why


def test_where_slurm_says_nothing_everything_is_a_question():
    settings = settings_of(ClusterFacts(unanswered={"sacctmgr": "there is no `sacctmgr` here"}))
    assert all(setting.value is None and "?" in setting.why for setting in settings.values() if setting.key != "mem")
    assert "there is no `sacctmgr` here" in settings["account"].why


def test_gpus_that_the_catalogue_does_not_know_are_asked_for():
    facts = facts_of(SLURM_22_05._replace(node=SLURM_22_05.node.replace("gpu:h100", "gpu:foo9000")))
    assert settings_of(facts)["gpu"].value is None
    assert "Slurm calls them foo9000" in settings_of(facts)["gpu"].why
    assert decided(facts)["gpus_per_node"] == 8


def test_what_the_login_node_shows_stands_beside_the_questions():
    facts = facts_of(
        SLURM_24_11,
        mounts=parse_df(DF, ["/home/alice", "/scratch/alice", "/tmp"]),
        interfaces=parse_ip(IP),
        modules=parse_modules(LMOD),
        quotas=parse_quota(QUOTA),
        runtimes=("apptainer", "enroot"),
        environ={"HOME": "/home/alice", "SCRATCH": "/scratch/alice", "https_proxy": "http://me:pw@proxy:3128"},
    )
    settings = settings_of(facts)
    assert settings["interface"].example == "ib0"
    assert settings["modules"].example == ("cuda/12.8.1",)
    assert "apptainer, enroot" in settings["apptainer"].why
    assert "in memory" in settings["tmpdir"].why
    assert "where 33 GiB are left: set HF_HOME" in settings["env"].why
    assert settings["env"].example == {"HF_HOME": "$SCRATCH/huggingface"}
    text = site_text(settings.values(), head="x")
    assert "A proxy is set here (https_proxy)" in " ".join(text.replace("#", " ").split())
    assert "me:pw" not in text


@pytest.mark.parametrize(
    ("runtimes", "key"),
    [(("enroot",), "pyxis"), (("podman-hpc",), "podman_hpc"), (("ch-run",), "charliecloud"), (("shifter",), None)],
)
def test_a_container_s_runtime_has_its_own_setting(runtimes, key):
    keys = settings_of(facts_of(SLURM_22_05, runtimes=runtimes)).keys()
    assert keys & {"apptainer", "pyxis", "podman_hpc", "charliecloud"} == ({key} if key else set())


@pytest.mark.parametrize("printed", [SLURM_22_05, SLURM_24_11])
@pytest.mark.parametrize("engine", [None, "0.32.0"])
def test_the_file_is_read_as_it_was_decided(site_of, printed, engine):
    facts = facts_of(printed, environment="/home/alice/my env: x", engine=engine, runtimes=("apptainer",))
    site = site_of(site_text(choose_settings(facts), head="Written by a test"))
    wanted = {key: value if isinstance(value, (bool, int)) else str(value) for key, value in decided(facts).items()}
    assert {key: getattr(site, key) for key in wanted} == wanted


def test_every_question_can_be_answered_by_taking_its_mark_away(site_of):
    facts = facts_of(SLURM_24_11, runtimes=("apptainer",), modules=parse_modules(LMOD))
    for setting in choose_settings(facts):
        site_of(f"{setting.key}: {yaml_value(setting.example if setting.value is None else setting.value)}\n")


def test_what_the_system_s_file_sets_is_not_set_again():
    settings = choose_settings(facts_of(SLURM_24_11))
    text = site_text(settings, head="x", above={"partition": "/etc/hpc-serve/site.yaml"})
    assert "\n# partition: boost\n" in text
    assert "It is set in /etc/hpc-serve/site.yaml" in " ".join(text.replace("#", " ").split())
    assert "\naccount: genom\n" in text


def test_words_of_the_cluster_cannot_leave_their_comment():
    name = "gpu\nvenv: /evil\r\x1b[2J"
    facts = replace(facts_of(SLURM_22_05), partitions=(PartitionFacts(name=name),))
    text = site_text(choose_settings(facts), head=name)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == []


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
        ("a100-40", (), "a100-40gb"),
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


def test_nodes_that_sleep_count_as_nodes():
    sleeping = SLURM_24_11.node.replace("State=IDLE", "State=IDLE+CLOUD+POWERED_DOWN")
    facts = facts_of(SLURM_24_11)
    assert with_nodes(facts.partitions, parse_nodes(sleeping))[1].nodes[0].name == "b001"


def test_whole_gpus_are_chosen_before_their_parts():
    node = SLURM_22_05.node.replace("Gres=gpu:h100:8", "Gres=gpu:b200_2g.45gb:16,gpu:b200:4")
    found = decided(facts_of(SLURM_22_05._replace(node=node)))
    assert (found["gpu"], found["gpus_per_node"], found["gres_type"]) == ("b200-180gb", 4, "b200")


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
