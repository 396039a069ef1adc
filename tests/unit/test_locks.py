"""What envs/venv.sh installs: exact versions with hashes, all that is asked for, from no index that nobody named."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ENVS = Path(__file__).resolve().parents[2] / "envs"
PINNED = re.compile(r"([A-Za-z0-9_.-]+)==[^ \\;]+( ; [^\\]+?)?(( \\\n   )? --hash=sha256:[0-9a-f]{64})+\n")


def pinned(name: str) -> list[str]:
    text = re.sub(r"^#.*\n", "", (ENVS / name / "lock.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert PINNED.sub("", text) == "", "every line is a package with hashes"
    return [re.sub(r"[_.]", "-", match[1]).lower() for match in PINNED.finditer(text)]


def test_every_package_has_hashes_and_none_is_locked_twice() -> None:
    least = {"cpu": 20, "dev": 20, "docs": 20, "browser": 2, "podman-hpc": 4, "versions": 20}
    assert [name for name, count in least.items() if len(pinned(name)) < count] == []
    both = pinned("cpu") + pinned("dev")
    assert len(both) == len(set(both))


def test_what_is_asked_for_is_locked() -> None:
    config = configparser.ConfigParser()
    config.read(ENVS.parent / "setup.cfg")
    needed = config["options"]["install_requires"].split()
    extras = [line for extra in ("dev", "plot") for line in config["options.extras_require"][extra].split()]
    names = {re.split(r"[<>=~]", line)[0].lower() for line in needed}
    assert names <= set(pinned("cpu"))
    assert names <= set(pinned("versions"))
    assert {re.split(r"[<>=~]", line)[0].lower() for line in extras} <= set(pinned("cpu") + pinned("dev"))


def test_no_script_names_an_index() -> None:
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in ENVS.glob("*.sh"))
    assert re.findall(r"https?://\S+", scripts) == []
    assert re.findall(r"--(?:extra-)?index-url \S+", scripts) == ['--extra-index-url "$TORCH_INDEX")']


def test_each_line_of_the_recipes_files_is_one_source_and_one_destination() -> None:
    """Apptainer takes the second word of a line as the destination, and leaves out the words after it."""
    lines = (ENVS / "container" / "hpc-serve.def").read_text().split("%files\n")[1].split("\n\n")[0].splitlines()
    copied = dict(line.split() for line in lines)
    assert copied == {name: f"/opt/hpc-serve/{name}" for name in copied}
    assert {"setup.cfg", "pyproject.toml", "hpc_serve", "templates"} <= set(copied)
    assert all((ENVS.parent / name).exists() for name in copied)
