"""Filesystems that all hosts of the test cluster share: one of its own that can fill up, and one that lags.

They are mounted below a folder that every host has, in the mount namespace of each host. `remove` takes them away.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster import SlurmCluster, hosts, wait_for
from tests.cluster.hosts import run_as_root

SIZE_MIB = 64
CACHE_S = 20


class OwnFilesystem:
    """A small ext4 of its own at `folder`, the same on all hosts and on the machine."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.folder = folder
        image = folder.with_name(folder.name + ".ext4")
        with image.open("wb") as file:
            file.truncate(SIZE_MIB << 20)
        run_as_root(["mkfs.ext4", "-q", "-m", "0", str(image)])
        # One device for all: each mount of it shares the filesystem's state.
        self._device = run_as_root(["losetup", "--find", "--show", str(image)]).strip()
        self._inits = _inits(cluster)
        for prefix in self._everywhere():
            run_as_root([*prefix, "mount", self._device, str(folder)])

    def _everywhere(self) -> list[list[str]]:
        inside = [_entering(init) for init in self._inits]
        return [[], *inside]

    def set_frozen(self, value: bool) -> None:
        """Whoever writes to a frozen filesystem hangs until it is free again; reading goes on."""
        run_as_root(["fsfreeze", "--freeze" if value else "--unfreeze", str(self.folder)])

    def fill(self) -> Path:
        """Take all the space that is left; returns the file that holds it."""
        filler = self.folder / "filler"
        append = ["dd", "if=/dev/zero", f"of={filler}", "oflag=append", "conv=notrunc"]
        for block in ("bs=64k", "bs=1k"):  # a large block that does not fit leaves room for small files
            subprocess.run([*append, block], capture_output=True, check=False)
        return filler

    def remove(self) -> None:
        for prefix in self._everywhere():
            run_as_root([*prefix, "umount", "--lazy", str(self.folder)])
        run_as_root(["losetup", "--detach", self._device])


class LaggingFilesystem:
    """A FUSE mount over `folder` on every host: attributes, names and missing names are cached for CACHE_S seconds."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.folder = folder
        cached = ",".join(f"{kind}_timeout={CACHE_S}" for kind in ("attr", "entry", "negative"))
        self._daemons = []
        for init in _inits(cluster):
            enter = _entering(init)
            argv = [*enter, "bindfs", "-f", "-o", f"allow_other,{cached}", str(folder), str(folder)]
            self._daemons.append((enter, subprocess.Popen(argv, stdin=subprocess.DEVNULL)))
        wait_for(self._are_mounted, 20, what=f"the mounts of {folder}")

    def _are_mounted(self) -> bool:
        look = ["mountpoint", "--quiet", str(self.folder)]
        return all(subprocess.run([*enter, *look], check=False).returncode == 0 for enter, _ in self._daemons)

    def remove(self) -> None:
        for enter, daemon in self._daemons:
            subprocess.run([*enter, "umount", "--lazy", str(self.folder)], check=False)
            daemon.wait(timeout=20)


def _inits(cluster: SlurmCluster) -> list[int]:
    found = [hosts.init_pid(cluster.config, host) for host in cluster.config.hosts]
    return [init for init in found if init is not None]


def _entering(init: int) -> list[str]:
    """Into a host's mounts, with its process numbers: mount and umount look at /proc/self."""
    return ["nsenter", "--mount", "--pid", f"--target={init}"]
