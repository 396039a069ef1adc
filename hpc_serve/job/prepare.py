"""Prepares a run, once, on the head node: the batch script evaluates the shell exports that this program prints.

It makes the run's private folder with Ray's token, makes the service's API key if there is none, and chooses the head's
address and the name of the node-local folder. Every attempt of a script prepares anew. Standard output has
the exports alone; errors are logged to standard error.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError, StoreError
from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import make_run_dir, remove_old_run_dirs
from hpc_serve.job.machine.allocation import Allocation, Share, read_allocation, set_up_logging
from hpc_serve.job.machine.network import LOOPBACK, node_address
from hpc_serve.job.run.node import ray_dir
from hpc_serve.job.run.record_keeper import publish_failure
from hpc_serve.rendezvous.claims import require_filelock
from hpc_serve.rendezvous.fields import expanded_log_dir
from hpc_serve.rendezvous.files import make_log_dir, remove_file
from hpc_serve.rendezvous.ownership import require
from hpc_serve.rendezvous.store import ServiceStore, default_home, drain_file

_log = logging.getLogger(__name__)

# Ray makes UNIX sockets below its folder. The kernel allows 107 characters, and Ray's part takes 64 of them.
_MAX_RAY_DIR_LENGTH = 43


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_serve.job.prepare", description=__doc__)
    parser.add_argument("--service", required=True)
    parser.add_argument("--replica", default="0/1", metavar="K/N", help="which of the replicas of the job")
    options = parser.parse_args(argv)
    set_up_logging(sys.stderr)
    allocation = None
    try:
        allocation = read_allocation(os.environ, Share.from_text(options.replica))
        exports = prepare(options.service, allocation, os.environ)
    except HpcServeError as error:
        _log.error("%s", error)
        publish_failure(options.service, allocation, error, os.environ)
        return error.exit_code
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def prepare(service: str, allocation: Allocation, environ: Mapping[str, str]) -> dict[str, str]:
    """Make what a run needs; returns the variables that its processes must have."""
    _check_working_folder()
    require_filelock()  # before there are launchers: those of other nodes would wait for the head's
    store = ServiceStore(default_home(environ))
    if allocation.restart > 0:  # only the first run of a job makes the folders
        store.require_service(service)
    api_key_file = store.ensure_api_key(service)
    named = environ.get("HPC_SERVE_LOG_DIR") or str(store.log_dir(service))
    log_dir = _make_log_dir(Path(expanded_log_dir(named, environ, service=service, job_id=allocation.job_id)))
    node_dir_name = choose_node_dir(environ.get("HPC_SERVE_TMPDIR") or "/tmp")
    is_local, interface = allocation.cluster == "local", environ.get("HPC_SERVE_INTERFACE")
    address = LOOPBACK if is_local else node_address(interface=interface, towards=None)
    remove_old_run_dirs(store)
    drain_request = drain_file(store, service, allocation.record_name)
    remove_file(drain_request)  # a job on this machine may have the pid of one before
    run_dir = make_run_dir(store.home, allocation)  # the last step that can fail: it leaves a secret
    return {
        "HPC_SERVE_HOME": str(store.home),
        "HPC_SERVE_JOB_ID": allocation.job_id,
        "HPC_SERVE_JOB_DIR": str(run_dir),
        "HPC_SERVE_LOG_DIR": str(log_dir),
        "HPC_SERVE_NODE_TMP": node_dir_name,
        "HPC_SERVE_HEAD_ADDRESS": address,
        "HPC_SERVE_API_KEY_FILE": str(api_key_file),
        "HPC_SERVE_DRAIN_FILE": f"{node_dir_name}/drain",
        "HPC_SERVE_DRAIN_REQUEST": str(drain_request),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(run_dir / "ray_token"),
    }


def _check_working_folder() -> None:
    """Raises InvalidRequestError if Python would import from the working folder what another user has put there.

    Python 3.11 and later do not import from it, since the script sets PYTHONSAFEPATH.
    """
    if sys.version_info < (3, 11):
        folder = Path.cwd()
        require(
            folder,
            "read",
            called=f"the working folder {folder}",
            advice=f"Python {sys.version_info[0]}.{sys.version_info[1]} imports modules from it, which run as you: "
            "submit from a folder of your own, or use an environment with Python 3.11 or later.",
        )


def _make_log_dir(path: Path) -> Path:
    """Make the folder of logs if it is missing. Raises InvalidRequestError; srun would only say that IO failed."""
    try:
        return make_log_dir(path, called="HPC_SERVE_LOG_DIR")
    except StoreError as error:
        raise InvalidRequestError(str(error)) from error


def choose_node_dir(root: str) -> str:
    """Choose a new name for the node-local folder, equal on every node. Raises InvalidRequestError if it is too
    long."""
    name = node_dir.choose_name(root)
    ray = ray_dir(name)
    if len(ray) > _MAX_RAY_DIR_LENGTH:
        raise InvalidRequestError(
            f"HPC_SERVE_TMPDIR={root} is too long: {ray} has {len(ray)} characters, and Ray's sockets below it allow "
            f"{_MAX_RAY_DIR_LENGTH}. Set it to a shorter node-local folder."
        )
    return name


if __name__ == "__main__":
    sys.exit(main())
