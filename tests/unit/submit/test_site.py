"""The site file: what it gives, what wins over it, and what it refuses."""

from __future__ import annotations

import pytest

from hpc_serve.errors import SiteFileError
from hpc_serve.submit.site.site import SiteProfile, load_site

FULL = """
partition: gpu
account: 0123            # a number to YAML, a name to Slurm
qos: on                  # a boolean to YAML 1.1
time: 24:00:00           # 86400 to YAML 1.1
mem: 0
cpus_per_task: 8
exclusive: yes
sbatch_extra: [--switches=1, --mail-type=END]
gpu: h100-80gb
gpus_per_node: 4
gpu_directive: gres
gres_type: h100
modules:
  - cuda/12.8
  - gcc
venv: ~/envs/serve
interface: ib0
tmpdir: /local
cache_dir: /local/cache
cache_size: 4GiB
log_dir: ~/logs
constraint:
"""


def test_every_value_is_taken_as_it_is_written(site_of, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    site = site_of(FULL)
    assert (site.account, site.qos, site.time, site.mem) == ("0123", "on", "24:00:00", "0")
    assert (site.cpus_per_task, site.exclusive, site.gpus_per_node) == (8, True, 4)
    assert site.modules == ("cuda/12.8", "gcc")
    assert (site.venv, site.log_dir) == ("/home/alice/envs/serve", "/home/alice/logs")
    assert site.constraint is None


def test_it_becomes_sbatch_options_and_what_is_asked_for_wins(site_of):
    site = site_of(FULL)
    options = site.slurm_options(partition="short", account=None, extra=())
    assert (options.partition, options.account, options.time) == ("short", "0123", "24:00:00")
    assert (options.gpu_directive, options.gres_type, options.exclusive) == ("gres", "h100", True)
    assert options.extra == ("--switches=1", "--mail-type=END")
    assert site.slurm_options(extra=("--begin=now",)).extra == ("--begin=now",)


def test_a_flag_may_be_false_where_the_site_says_true(site_of):
    site = site_of("exclusive: true\n")
    assert site.slurm_options(exclusive=False).exclusive is False


def test_the_environment_is_the_site_s_unless_a_person_names_one():
    site = SiteProfile(apptainer="/images/vllm.sif", binds=("/scratch",), modules=("apptainer",))
    assert site.environment({}).kind == "apptainer"
    assert site.environment({}).binds == ("/scratch",)
    own = site.environment({"HPC_SERVE_ENV": "/home/alice/env"})
    assert (own.kind, own.modules) == ("auto", ("apptainer",))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("apptainer", "apptainer"), ("pyxis", "pyxis"), ("podman_hpc", "podman-hpc"), ("charliecloud", "charliecloud")],
)
def test_each_container_runtime_has_a_setting(site_of, name, kind):
    site = site_of(f"{name}: /images/vllm\nbinds: [/a, /b]\ncontainer_options: [--verbose]\n")
    found = site.environment({})
    assert (found.kind, found.path, found.is_container) == (kind, "/images/vllm", True)
    assert (found.binds, found.container_options) == (("/a", "/b"), ("--verbose",))
    with pytest.raises(SiteFileError, match="keep one"):
        site_of(f"venv: /env\n{name}: /images/vllm\n")


def test_a_variable_wins_over_the_site_s_network():
    site = SiteProfile(interface="ib0", tmpdir="/local")
    settings = site.job_settings({"HPC_SERVE_INTERFACE": "eth1"})
    assert (settings.interface, settings.tmpdir, settings.cache_dir) == ("eth1", "/local", None)


@pytest.mark.parametrize("size", ["4GiB", "0"])
def test_the_size_of_the_caches_reaches_the_script_and_a_variable_wins_over_it(site_of, size):
    site = site_of(f"cache_size: {size}\n")
    assert site.job_settings({}).exports() == {"HPC_SERVE_CACHE_SIZE": size}
    assert site.job_settings({"HPC_SERVE_CACHE_SIZE": "1GiB"}).exports() == {"HPC_SERVE_CACHE_SIZE": "1GiB"}


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "partition:\n"])
def test_an_empty_file_sets_nothing(site_of, text):
    assert site_of(text) == SiteProfile()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partition: gpu\npartitoin: gpu\n", ["site.yaml:2", "'partitoin'", "Did you mean partition?"]),
        ("gpus-per-node: 4\n", ["site.yaml:1", "Did you mean gpus_per_node?"]),
        ("zzz: 1\n", ["unknown setting 'zzz'", "The settings are: partition, account"]),
        ("gpus_per_node: four\n", ["site.yaml:1: gpus_per_node is 'four'", "whole number"]),
        ("\ncpus_per_task: 1.5\n", ["site.yaml:2: cpus_per_task is '1.5'"]),
        ("exclusive: perhaps\n", ["exclusive is 'perhaps'", "true or false"]),
        ("partition: [a, b]\n", ["partition must be one value"]),
        ("modules: {a: b}\n", ["modules must be a list of words"]),
        ("modules: [[a], b]\n", ["modules must be a list of words"]),
        ("partition: a\npartition: b\n", ["site.yaml:2", "set twice"]),
        ("venv: /a\nconda: b\n", ["venv and conda", "keep one"]),
        ("- partition\n", ["must hold settings"]),
        ("gpu_memory: 1e999GiB\n", ["site.yaml", "1e999"]),
        (f"gpu_memory: {'9' * 400}.5GiB\n", ["site.yaml"]),
        (f"gpus_per_node: {'9' * 5000}\n", ["site.yaml"]),
        (f"templates_dir: /{'a' * 300}\n", ["site.yaml", "a value that cannot be used"]),
        ('templates_dir: "/a\\0b"\n', ["site.yaml"]),
        ("[" * 5000, ["site.yaml"]),
        ("partition: 'a\n", ["not YAML"]),
        ("partition: 'a b'\n", ["partition is 'a b'"]),
        ("gpu_directive: gpus\n", ["gpu_directive is 'gpus'"]),
        ("time: soon\n", ["time is 'soon'"]),
        ("cache_size: much\n", ["site.yaml", "'much' is no size"]),
        ("templates_dir: /dev/null/x\n", ["/dev/null/x is not a folder"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(site_of, text, words):
    with pytest.raises(SiteFileError) as caught:
        site_of(text)
    for word in words:
        assert word in str(caught.value)


def test_a_named_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(SiteFileError, match=r"none.yaml cannot be read: No such file or directory\.$"):
        load_site(tmp_path / "none.yaml")
