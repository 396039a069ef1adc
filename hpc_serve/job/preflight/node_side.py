"""One node's part in the preflight: it gathers its facts, and tells which other nodes it cannot reach.

The facts are gathered in the background, each group in a thread of its own with a time limit. A group that does not
come in time, as from a filesystem that hangs, is left out; its thread ends with the launcher. To be reached, each node
listens on a port of the kernel's choice at its engine's address. Both nodes prove that they hold the run's token
(`Admission`), so a stranger's program at an address does not pass for a node. `head_side` asks, and `judge` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpc_serve.background import in_background
from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.links.link import Admission, Message, greeting, open_with_ticket
from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.preflight import gather_gpus, gather_node
from hpc_serve.job.preflight.checks import CACHES, LOGS, STAGED
from hpc_serve.job.preflight.facts import Needs, NodeFacts
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import to_json_text
from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import Argument, names_in, read_arguments, value_of

_log = logging.getLogger(__name__)

# -- nodes that reach each other

_BACKLOG = 1_024
_AT_ONCE = 64
_TRY_AGAIN_S = 0.5
_LONGEST_ERROR = 120


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The address where a node listens for the others."""

    name: str
    address: str
    port: int


class PeerListener:
    """Listens at `address` until it is closed. Raises OSError."""

    def __init__(self, name: str, address: str, token: str) -> None:
        self._name, self._token = name, token
        listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self.peer = Peer(name=name, address=address, port=int(listener.getsockname()[1]))
        self._admission = Admission(listener, token, self._answer)

    def close(self) -> None:
        self._admission.close()

    def _answer(self, connection: socket.socket, nonce: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting(self._token, _role(self._name), nonce))


async def find_unreached(peers: Sequence[Peer], token: str, *, within_s: float) -> dict[str, str]:
    """Return the unreachable peers by name, each with its last error. Each is tried again for `within_s` seconds."""
    turns = asyncio.Semaphore(_AT_ONCE)
    deadline = time.monotonic() + within_s

    async def try_peer(peer: Peer) -> str:
        async with turns:
            while True:
                left_s = max(_TRY_AGAIN_S, deadline - time.monotonic())
                try:
                    return await asyncio.wait_for(_reach(peer, token, left_s), left_s)
                except asyncio.TimeoutError:
                    error = f"no answer from {peer.address} within {within_s:.0f} s"
                except (OSError, ValueError, EOFError) as found:
                    error = str(found)[:_LONGEST_ERROR] or type(found).__name__
                if time.monotonic() + _TRY_AGAIN_S > deadline:
                    return error
                await asyncio.sleep(_TRY_AGAIN_S)

    errors = await asyncio.gather(*map(try_peer, peers))
    return {peer.name: error for peer, error in zip(peers, errors) if error}


async def _reach(peer: Peer, token: str, within_s: float) -> str:
    """Returns "" if it is the node. Raises OSError, asyncio.TimeoutError, EOFError, ValueError."""
    _, writer, _ = await open_with_ticket((peer.address, peer.port), token, _role(peer.name), within_s=within_s)
    writer.transport.abort()
    return ""


def _role(name: str) -> str:
    return f"reached:{name}"


# -- the answers to the head

GPUS_S, _GROUP_S = 120.0, 20.0
REACH_S = 20.0
# Arguments that name another place or another revision of the weights or their config.
_ELSEWHERE = frozenset(
    {"--download-dir", "--revision", "--model-loader-extra-config", "--hf-config-path", "--config-format"}
)
_OWN_TOKENIZER = frozenset({"--tokenizer", "--skip-tokenizer-init", "--tokenizer-mode", "--tokenizer-revision"})


def needs_of(node: Node) -> Needs:
    """Return the needs of each node, from the run's command and launcher."""
    given, names = read_arguments(node.command.options), names_in(node.command.options)
    options, environ = node.options, node.environ
    return Needs(
        num_nodes=node.allocation.num_nodes,
        gpus=options.gpus_per_node if options.device == "GPU" else 0,
        world_size=node.command.world_size,
        backend=node.backend,
        memory_bytes=node.allocation.memory_bytes,
        dtype=str(_value(given, "--dtype", "auto")),
        gpu_memory_utilization=float(_value(given, "--gpu-memory-utilization", Needs.gpu_memory_utilization)),
        sets_cache_bytes="--kv-cache-memory-bytes" in names,
        offload_bytes=int(float(_value(given, "--cpu-offload-gb", 0.0)) * GIB),
        staged_bytes=node.staging.total_bytes if node.staging is not None else 0,
        has_own_tokenizer=bool(_OWN_TOKENIZER & names),
        load_format=str(_value(given, "--load-format", "auto")),
        has_own_gloo_interface=bool(environ.get("GLOO_SOCKET_IFNAME")),
        ignores_ray_versions=bool(environ.get("RAY_IGNORE_VERSION_MISMATCH")),
        engine_words=node.command.options,
    )


class NodePreflight:
    """One node's part: it answers the head's two questions. The head asks itself, too."""

    def __init__(self, node: Node) -> None:
        self.rank, self.name = node.allocation.node_rank, node.allocation.node_name
        self._node = node
        self._listener: PeerListener | None = None

    async def ask(self, kind: str, **fields: Any) -> Message:
        """Answer as a node at the other end of a link does."""
        return await self.answer({"kind": kind, **fields})

    async def answer(self, question: Message) -> dict[str, Any]:
        """Return the facts of this node, or which nodes it cannot reach; nothing after an error, which is logged."""
        try:
            if question["kind"] == "peers":
                others = [Peer(name=str(name), address=str(at), port=int(port)) for name, at, port in question["peers"]]
                return {"nodes": await find_unreached(others, self._node.token, within_s=REACH_S)}
            facts = await _gather_facts(self._node)
            return {"facts": to_json_text(facts), "port": self._listen(facts), "now": time.time()}
        except Exception:
            _log.exception("the head's questions before the start could not be answered")
            return {}

    def close(self) -> None:
        """Let no other node try to reach this one: the head goes on once all have tried."""
        if self._listener is not None:
            self._listener.close()

    def _listen(self, facts: NodeFacts) -> int:
        """Let the other nodes try to reach this one; returns the port, 0 without others, or where it cannot listen."""
        if self._node.allocation.num_nodes == 1:
            return 0
        try:
            self._listener = PeerListener(facts.name, facts.address, self._node.token)
        except OSError:  # the address is not one of this node's own, as behind a translation
            return 0
        return self._listener.peer.port


async def _gather_facts(node: Node) -> NodeFacts:
    """Return the facts of all groups that come in time."""
    gatherers = _gatherers(node)
    answers = dict(zip(gatherers, await asyncio.gather(*map(_answer, gatherers, gatherers.values()))))
    return NodeFacts(
        name=node.allocation.node_name,
        address=node.address,
        **{name: value for name, (value, _, _) in answers.items()},
        took_s={name: took_s for name, (_, took_s, _) in answers.items()},
        problems={name: problem for name, (_, _, problem) in answers.items() if problem},
    )


async def _answer(name: str, gather: Callable[[], Any]) -> tuple[Any, float, str]:
    """Gather in a thread: a value, the seconds that it took, and what went wrong."""
    limit_s = GPUS_S if name == "gpus" else _GROUP_S

    def run() -> tuple[Any, float, str]:
        began_at, value, problem = time.monotonic(), None, ""
        try:
            value = gather()
        except Exception as error:  # whatever it is, the engine may start without that group
            problem = f"{type(error).__name__}: {error}"
        return value, time.monotonic() - began_at, problem

    try:
        return await asyncio.wait_for(asyncio.wrap_future(in_background(run)), limit_s)
    except asyncio.TimeoutError:
        return None, 0.0, f"no answer within {limit_s:.0f} s"


def _gatherers(node: Node) -> dict[str, Callable[[], Any]]:
    needs, environ = needs_of(node), {**node.environ, **mark_environ(node.run_mark)}
    command = node.command
    starts_engine = node.allocation.is_head or node.backend != "ray"
    commands = [*([command.argv[0]] if starts_engine else []), *(["ray"] if node.backend == "ray" else [])]
    sockets = environ.get("VLLM_RPC_BASE_PATH") or str(node.node_dir)
    ask_hub = gather_node.ask_hub if node.allocation.is_head else None
    gatherers: dict[str, Callable[[], Any]] = {
        "gpus": partial(gather_gpus.gather_gpus, needs, environ),
        "memory": gather_node.gather_memory,
        "folders": lambda: gather_node.gather_folders(_folders(node)),
        "limits": gather_node.gather_limits,
        "weights": partial(
            gather_node.gather_weights, command.weights, environ, load_format=needs.load_format, ask_hub=ask_hub
        ),
        "software": partial(gather_node.gather_software, environ, commands, sockets),
        "network": partial(gather_node.gather_network, node.address, node.environ),
    }
    if _ELSEWHERE & names_in(command.options):
        del gatherers["weights"]
    return gatherers


def _folders(node: Node) -> dict[str, str]:
    named = {CACHES: str(node.cache.path), LOGS: node.environ.get("HPC_SERVE_LOG_DIR")}
    if node.staging is not None and not node.staging.is_whole:
        named[STAGED] = str(node.staging.target)
    return {"temporary files": str(node.node_dir), **{purpose: path for purpose, path in named.items() if path}}


def _value(given: tuple[Argument, ...], name: str, default: Any) -> Any:
    try:
        value = value_of(given, name)
    except InvalidRequestError:  # of another version of vLLM
        return default
    return default if value is None else value
