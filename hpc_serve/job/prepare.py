"""Run once by the batch script on the head node, before `srun`: what all nodes must agree on, as shell exports.

It makes the run's private folder with Ray's token, makes sure the service has an API key, and chooses the head's
address, its ports and the name of the node-local folder. A second attempt simply runs it again and gets other ones.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.job import node_dir as folder
from hpc_serve.job.allocation import Allocation, read_allocation
from hpc_serve.job.network import HeadPorts, node_address
from hpc_serve.job.node import ray_dir
from hpc_serve.job.record_keeper import publish_failure
from hpc_serve.job.run_dir import make_job_dir, sweep_job_dirs
from hpc_serve.rendezvous.files import make_folders
from hpc_serve.rendezvous.ownership import check_log_dir
from hpc_serve.rendezvous.store import ServiceStore, default_home

# Ray makes UNIX sockets below it; the kernel allows 107 characters, Ray's own part takes 64.
_LONGEST_TMPDIR = 43


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.job.prepare", description=__doc__)
    parser.add_argument("--service", required=True)
    options = parser.parse_args(argv)
    allocation = None
    try:
        allocation = read_allocation(os.environ)
        exports = prepare(options.service, allocation, os.environ)
    except HpcServeError as error:
        print(f"hpc-serve: {error}", file=sys.stderr)
        publish_failure(options.service, allocation, error, os.environ)
        return error.exit_code
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def prepare(service: str, allocation: Allocation, environ: Mapping[str, str]) -> dict[str, str]:
    """Make what a run needs and return what its processes must be told, by variable name."""
    store = ServiceStore(default_home(environ))
    api_key_file = store.ensure_api_key(service)
    log_dir = make_log_dir(Path(environ.get("HPC_SERVE_LOG_DIR") or store.log_dir(service)))
    node_tmp = node_tmp_name(environ.get("HPC_SERVE_TMPDIR") or "/tmp")
    if allocation.cluster == "local":
        address = "127.0.0.1"
    else:
        address = node_address(interface=environ.get("HPC_SERVE_INTERFACE"), towards=None)
    sweep_job_dirs(store)
    ports = HeadPorts.choose()
    job_dir = make_job_dir(store.home, allocation)  # the last that can fail: it holds a secret
    return {
        "HPC_SERVE_HOME": str(store.home),
        "HPC_SERVE_JOB_ID": allocation.job_id,
        "HPC_SERVE_JOB_DIR": str(job_dir),
        "HPC_SERVE_LOG_DIR": str(log_dir),
        "HPC_SERVE_NODE_TMP": node_tmp,
        "HPC_SERVE_HEAD_ADDRESS": address,
        "HPC_SERVE_HEAD_PORTS": ports.to_text(),
        "HPC_SERVE_API_KEY_FILE": str(api_key_file),
        "HPC_SERVE_DRAIN_FILE": f"{node_tmp}/drain",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(job_dir / "ray_token"),
    }


def make_log_dir(path: Path) -> Path:
    """The folder of logs, made if it is missing. Raises InvalidRequestError: srun would only say that IO failed."""
    check_log_dir(path, called=f"HPC_SERVE_LOG_DIR={path}")
    try:
        make_folders(path)
    except OSError as error:
        raise InvalidRequestError(f"HPC_SERVE_LOG_DIR={path} cannot be made: {error.strerror}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"HPC_SERVE_LOG_DIR={path} cannot be written to.")
    return path


def node_tmp_name(root: str) -> str:
    """A name nobody has for the node-local folder, the same on every node. Raises InvalidRequestError if too long."""
    name = folder.new_name(root)
    longest = ray_dir(name)
    if len(longest) > _LONGEST_TMPDIR:
        raise InvalidRequestError(
            f"HPC_SERVE_TMPDIR={root} is too long: {longest} has {len(longest)} characters, and Ray's sockets below it "
            f"leave room for {_LONGEST_TMPDIR}. Set it to a shorter node-local folder."
        )
    return name


if __name__ == "__main__":
    sys.exit(main())
