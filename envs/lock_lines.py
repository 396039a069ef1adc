"""Prints what envs/lock.sh needs: a pylock.toml as lines that pip takes, with the hashes of wheels for Linux on x86_64.

lock_lines.py PYLOCK            name==version ; marker --hash=sha256:… for each package
lock_lines.py --wanted SETUP    what hpc-serve and its unit tests ask for, as setup.cfg says it
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path
from typing import Any

import tomllib

UNIT_TESTS_NEED = ("hypothesis", "pytest", "pytest-xdist")
TO_BUILD = ("setuptools>=68", "wheel")
FOR_HERE = re.compile(r"-(any|(manylinux|linux)[^-]*x86_64)\.whl$")
"""musllinux is left out: neither PyTorch nor Ray has wheels for it."""
ELSEWHERE = ("win32", "emscripten")
ALWAYS = re.compile(r"^python_full_version >= '3\.10'( and )?")
"""True of every Python that hpc-serve runs on."""


def lines(lock: dict[str, Any]) -> list[str]:
    """One requirement for each package, with the hash of every wheel that pip may choose."""
    found = []
    for package in lock["packages"]:
        marker = ALWAYS.sub("", package.get("marker", ""))
        if any(f"sys_platform == '{other}'" in marker for other in ELSEWHERE):
            continue
        wheels = [wheel for wheel in package.get("wheels", []) if FOR_HERE.search(wheel["url"])]
        if not wheels:
            sys.exit(f"{package['name']} {package['version']} has no wheel for Linux on x86_64; only wheels are locked")
        hashes = sorted({wheel["hashes"]["sha256"] for wheel in wheels})
        head = f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else "")
        found.append(" \\\n".join([head, *(f"    --hash=sha256:{digest}" for digest in hashes)]))
    return found


def wanted(setup: str) -> list[str]:
    """install_requires, and of the extra `dev` what runs unit tests."""
    config = configparser.ConfigParser()
    config.read_string(setup)
    core = config["options"]["install_requires"].split("\n")
    dev = config["options.extras_require"]["dev"].split("\n")
    tests = [line for line in dev if re.split(r"[<>=~]", line)[0] in UNIT_TESTS_NEED]
    return [line for line in (*core, *tests, *TO_BUILD) if line]


if __name__ == "__main__":
    if sys.argv[1] == "--wanted":
        print("\n".join(wanted(Path(sys.argv[2]).read_text(encoding="utf-8"))))
    else:
        print("\n".join(lines(tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
