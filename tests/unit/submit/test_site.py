"""Site files: what each gives and refuses, which are read, who may write them, and what wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_serve.errors import SiteFileError
from hpc_serve.submit.site import site_files
from hpc_serve.submit.site.site import SiteProfile
from hpc_serve.submit.site.site_files import find_system_file, find_user_file, merge_site, read_site
from tests.support.sites import load_site

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
    assert site.slurm_options(exclusive=False).exclusive is False


def test_the_environment_is_the_site_s_unless_a_person_names_one():
    site = SiteProfile(apptainer="/images/vllm.sif", modules=("apptainer",))
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


@pytest.fixture
def files(tmp_path):
    """Writes both files; returns the environment that names them."""

    def write(system: str | None, user: str | None) -> dict[str, str]:
        environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HPC_SERVE_SYSTEM_SITE": ""}
        if system is not None:
            (tmp_path / "system.yaml").write_text(system)
            (tmp_path / "system.yaml").chmod(0o644)
            environ["HPC_SERVE_SYSTEM_SITE"] = str(tmp_path / "system.yaml")
        if user is not None:
            path = tmp_path / "config" / "hpc-serve" / "site.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(user)
        return environ

    return write


def test_the_user_s_settings_win_one_by_one(files, tmp_path):
    environ = files("partition: gpu\naccount: all\nmodules: [cuda, gcc]\n", "account: mine\nmodules: [cuda]\n")
    merged = merge_site(environ)
    assert (merged.profile.partition, merged.profile.account, merged.profile.modules) == ("gpu", "mine", ("cuda",))
    names = {name: path.name for name, path in merged.sources.items()}
    assert names == {"partition": "system.yaml", "account": "site.yaml", "modules": "site.yaml"}
    assert [file.name for file in merged.files] == ["system.yaml", "site.yaml"]


def test_an_empty_setting_takes_the_system_s_away(files):
    merged = merge_site(files("partition: gpu\nmodules: [cuda]\n", "partition:\nmodules: []\n"))
    assert (merged.profile.partition, merged.profile.modules, merged.settings) == (None, (), {})


def test_an_environment_of_one_s_own_replaces_the_system_s_of_another_kind(files):
    merged = merge_site(files("apptainer: /images/vllm.sif\nbinds: [/scratch]\n", "venv: /home/me/env\n"))
    assert (merged.profile.apptainer, merged.profile.venv) == (None, "/home/me/env")
    assert merged.profile.environment({}).kind == "venv"


def test_a_mistake_is_said_with_its_own_file(files):
    environ = files("partitoin: gpu\n", "account: mine\n")
    with pytest.raises(SiteFileError, match=r"system.yaml:1: unknown setting 'partitoin'. Did you mean partition\?"):
        read_site(environ)


@pytest.mark.parametrize(
    ("mode", "user", "group", "why"),
    [
        (0o666, -1, -1, "can be changed by everybody"),
        (0o664, -1, 64_999, "can be changed by group"),
        (0o644, 64_999, 64_999, "belongs to user 64999"),
    ],
)
def test_a_system_s_file_that_others_can_change_is_not_used(files, tmp_path, mode, user, group, why):
    environ = files("venv: /evil\n", None)
    (tmp_path / "system.yaml").chmod(mode)
    if group != -1 and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(tmp_path / "system.yaml", user, group)
    with pytest.raises(SiteFileError, match=f"{why}.*HPC_SERVE_SYSTEM_SITE= "):
        read_site(environ)
    assert read_site(environ | {"HPC_SERVE_SYSTEM_SITE": ""}).venv is None


def test_a_system_s_file_that_is_named_must_be_there(tmp_path):
    with pytest.raises(SiteFileError, match="No such file"):
        read_site({"HPC_SERVE_SYSTEM_SITE": str(tmp_path / "none"), "XDG_CONFIG_HOME": str(tmp_path)})


def test_the_usual_system_s_file_is_read_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(site_files, "SYSTEM_FILE", str(tmp_path / "site.yaml"))
    assert find_system_file({}) is None
    (tmp_path / "site.yaml").write_text("partition: gpu\n")
    assert find_system_file({}) == tmp_path / "site.yaml"
    assert read_site({"XDG_CONFIG_HOME": "/nonexistent"}).partition == "gpu"


def test_a_file_that_is_both_is_read_once(files, tmp_path):
    environ = files("partition: gpu\n", None)
    assert merge_site(environ, str(tmp_path / "system.yaml")).files == (tmp_path / "system.yaml",)


def test_which_file_is_the_user_s(tmp_path):
    (tmp_path / "hpc-serve").mkdir()
    (tmp_path / "hpc-serve" / "site.yaml").touch()
    config = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_user_file(config) == tmp_path / "hpc-serve" / "site.yaml"
    assert find_user_file(config | {"HPC_SERVE_SITE": "/a.yaml"}) == Path("/a.yaml")
    assert find_user_file(config | {"HPC_SERVE_SITE": "/a.yaml"}, "/b.yaml") == Path("/b.yaml")
    assert find_user_file({"XDG_CONFIG_HOME": "/nonexistent"}) is None


@pytest.mark.parametrize("what", ["file", "folder", "templates", "models"])
def test_words_that_everybody_can_change_are_not_used(files, tmp_path, what):
    (tmp_path / "templates").mkdir(mode=0o755)
    (tmp_path / "models.yaml").write_text("[]")
    environ = files(None, f"templates_dir: {tmp_path}/templates\nmodels: {tmp_path}/models.yaml\n")
    file = tmp_path / "config" / "hpc-serve" / "site.yaml"
    assert read_site(environ).models
    of_site = {"templates": tmp_path / "templates", "models": tmp_path / "models.yaml"}
    path = {"file": file, "folder": file.parent, **of_site}[what]
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(SiteFileError, match=r"can be changed by everybody .*chmod o-w"):
        read_site(environ)


def test_a_file_of_a_group_may_be_chosen(files, tmp_path):
    environ = files(None, "partition: gpu\n")
    (tmp_path / "group.yaml").write_text("partition: cpu\n")
    (tmp_path / "group.yaml").chmod(0o664)
    if os.geteuid() == 0:
        os.chown(tmp_path / "group.yaml", 64_999, 64_999)
    assert read_site(environ, str(tmp_path / "group.yaml")).partition == "cpu"
