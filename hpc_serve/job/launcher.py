"""One launcher on each node: it makes the node's private folder, reads its variables, and runs as head or as worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.local_weights import find_stand_in
from hpc_serve.job.cache.engine_cache import cache_key, open_cache
from hpc_serve.job.cleanup.node_dir import DirOwner, private_node_dir, remove_run_dir
from hpc_serve.job.machine.allocation import Allocation
from hpc_serve.job.ray.ray_logs import kept_ray_logs
from hpc_serve.job.run.node import LaunchOptions, Node, read_token, with_variables
from hpc_serve.job.weights.stage_folder import stage_base
from hpc_serve.job.weights.weights_place import with_strategy
from hpc_serve.vllm.command import choose_backend, read_command

_FROM_PREPARE = (
    *("HPC_SERVE_JOB_DIR", "HPC_SERVE_NODE_TMP", "HPC_SERVE_HEAD_ADDRESS"),
    *("HPC_SERVE_DRAIN_FILE", "HPC_SERVE_DRAIN_REQUEST"),
)


def launch(options: LaunchOptions, words: Sequence[str], allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Run this node's part of the service until it ends; returns the exit code. Raises HpcServeError.

    `words` is the engine's command.
    """
    if absent := [name for name in _FROM_PREPARE if name not in environ]:
        raise InvalidRequestError(
            f"{', '.join(absent)} not set: run `python -m hpc_serve.job.prepare` first, as the script does."
        )
    node_dir = Path(environ["HPC_SERVE_NODE_TMP"])
    run_dir = environ["HPC_SERVE_JOB_DIR"] if allocation.is_head else None
    owner = DirOwner(run_mark=f"{node_dir.name}-{allocation.node_rank}", run_dir=run_dir)
    with contextlib.ExitStack() as at_end:
        if run_dir is not None:  # the head alone names it, and is the last to need it
            at_end.callback(remove_run_dir, Path(run_dir))
        at_end.enter_context(private_node_dir(node_dir, owner))
        options = with_variables(options, environ)
        command = read_command(words, stand_in=find_stand_in(environ))
        backend = choose_backend(options.backend, command, allocation.num_nodes)
        key = cache_key(command, options.device, allocation.num_nodes)
        cache = at_end.enter_context(open_cache(key, node_dir, environ, allocation))
        staging = None
        if (base := stage_base(environ)) is not None:
            from hpc_serve.job.weights.staging import plan_staging  # most runs copy nothing

            staging = plan_staging(command, base, environ)
            at_end.callback(staging.close)
            command = staging.command(command)
            loading = f"vLLM's default (lazy): from the copy {staging.target} on the node"
        else:
            command, loading = with_strategy(command, environ, num_nodes=allocation.num_nodes)
        node = Node(
            options=options,
            allocation=allocation,
            command=command,
            loading=loading,
            backend=backend,
            head=environ["HPC_SERVE_HEAD_ADDRESS"],
            node_dir=node_dir,
            cache=cache,
            run_mark=owner.run_mark,
            token=read_token(environ),
            environ=environ,
            staging=staging,
        )
        at_end.enter_context(kept_ray_logs(node))
        # A worker needs neither the HTTP client nor the service's records: it does not import them.
        if allocation.is_head:
            from hpc_serve.job.head import run_head as run
        else:
            from hpc_serve.job.worker import run_worker as run
        return asyncio.run(run(node))
