"""The owner of a service, a member of its group and a stranger: real users of the file system, as only root can be."""

from __future__ import annotations

import grp
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.as_user import run_as

GROUP, OTHER = "games", "users"
GROUP_NUMBER, OTHER_NUMBER = (grp.getgrnam(name).gr_gid for name in (GROUP, OTHER))
OWNER, MEMBER, STRANGER = 64_001, 64_002, 64_003
NOBODY = 2**32 - 1  # in an entry of an ACL that is of no user or group by number
AS_OWNER = """
from hpc_serve.rendezvous import shares
from hpc_serve.rendezvous.files import write_private
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record, make_submitted
store = ServiceStore(Path(home))
def begin(service):
    store.ensure_api_key(service)
    store.write(make_record(service=service))
    store.write_submitted(make_submitted(service=service))
    write_private(store.service_dir(service) / "wanted.json", "{}")
    (store.log_dir(service) / "123.log").write_text("what was logged")
"""
READ = """
from hpc_serve.rendezvous.shares import named_service
store, service = named_service(f"{home}/services/{sys.argv[1]}", Path("/nowhere"))
found = store.read(service)
print(json.dumps([[one.name for one in found.records], len(store.read_api_key(service)), found.problems, service]))
"""
LOOK = """
seen = {}
for folder, names, files in os.walk(home, onerror=lambda error: None):
    seen[folder] = names
    for name in files:
        try:
            open(f"{folder}/{name}", "rb").close()
            seen[f"{folder}/{name}"] = True
        except PermissionError:
            pass
print(json.dumps(sorted(path[len(home):] for path in seen)))
"""


@dataclass
class People:
    """Users by their numbers, each in groups, with the owner's home for services."""

    home: Path

    def run(
        self, user: int, code: str, *words: str, groups: tuple[str | int, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        head = f"import json, os, sys\nfrom pathlib import Path\nhome = {str(self.home)!r}\n"
        return run_as(user, self.home.parent, "-c", head + code, *words, groups=groups)

    def owner(self, code: str, *groups: str) -> str:
        """Run code as the owner; returns the error, or "" if it ended well."""
        done = self.run(OWNER, AS_OWNER + code, groups=groups or (GROUP,))
        return "" if done.returncode == 0 else done.stderr

    def read(self, user: int, service: str, *groups: str | int) -> Any:
        """Return what a user reads of a service: names of records, length of the key, problems; or the error."""
        done = self.run(user, READ, service, groups=groups)
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    def seen(self, user: int, *groups: str) -> list[str]:
        """Return the files and folders below the home that a user can read."""
        return json.loads(self.run(user, LOOK, groups=groups).stdout)

    @property
    def service(self) -> People:
        """The same with the folder of 70b in place of the home."""
        return People(self.home / "services" / "70b")
