"""Lists the licence of every package in envs/cpu/lock.txt and envs/dev/lock.txt, as the installed packages state it.

    make licences        (.venv/bin/python envs/licences.py [LOCK ...])

It judges none of them. A package says it in up to three places: an SPDX expression, classifiers, or a text of its own.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

LOCKS = tuple(Path(__file__).with_name(name) / "lock.txt" for name in ("cpu", "dev"))
PACKAGE = re.compile(r"([A-Za-z0-9_.-]+)==([^ \\;]+)")
LONGEST = 60


def locked(lock: Path) -> list[tuple[str, str]]:
    """Name and version of each package in a lock."""
    found = (PACKAGE.match(line) for line in lock.read_text(encoding="utf-8").splitlines())
    return [(match[1], match[2]) for match in found if match]


def licence(package: Distribution) -> str:
    """What a package says its licence is."""
    expression = package.metadata.get("License-Expression")
    classifiers = package.metadata.get_all("Classifier") or []
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")]
    own_text = (package.metadata.get("License") or "").strip().split("\n")[0]
    files = ", ".join(sorted(str(name) for name in package.metadata.get_all("License-File") or ()))
    if expression or named or own_text:
        return expression or ", ".join(sorted(named)) or own_text[:LONGEST]
    return f"not stated; see its {files}" if files else "not stated"


def main(locks: list[Path]) -> int:
    rows = sorted({row for lock in locks for row in locked(lock)}, key=lambda row: row[0].lower())
    missing = []
    for name, version in rows:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        note = "" if found.version == version else f"  (installed: {found.version})"
        print(f"{name:42} {version:16} {licence(found)}{note}")
    if missing:
        print(f"not installed, so not listed: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main([Path(word) for word in sys.argv[1:]] or list(LOCKS)))
