"""The system's site file and the user's: which are read, who may write them, and what they say together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_serve.errors import SiteFileError
from hpc_serve.submit.site import site_files
from hpc_serve.submit.site.site_files import find_system_file, find_user_file, merge_site, read_site


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
