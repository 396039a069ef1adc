"""Talks to a stub engine on a gateway's page, in Chromium: `python -m tests.page_look PYTHON [WORDS…]`, by make.

PYTHON is that of the environment with the browser. envs/browser/talk.py says what is looked for, and takes the WORDS.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

from hpc_serve.gateway.settings import Settings
from tests.support.stubs import StubService
from tests.unit.gateway.conftest import served

TALK = Path(__file__).parents[1] / "envs" / "browser" / "talk.py"


def main() -> int:
    python, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(StubService(Path(folder) / "home")) as service:
        service.start("--stub-words", "40", "--stub-word-s", "0.05")
        with served(service.store, Settings()) as port:
            return subprocess.run([python, str(TALK), f"http://localhost:{port}/", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
