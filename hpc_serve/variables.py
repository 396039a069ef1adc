"""Every environment variable of hpc-serve, and what it says. docs/reference/environment-variables.md is made of it.

Each part reads the variables that it needs by itself. This table describes them, and a test finds any that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Setter = Literal["you", "us"]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable, in the words of the documents.

    `set_by` "us": only our own processes pass it on. A `kept` one is written down for jobs that submit or wake others.
    """

    name: str
    help: str
    default: str = ""
    set_by: Setter = "you"
    kept: bool = False


def _yours(name: str, help: str, default: str = "", *, kept: bool = False) -> Variable:
    return Variable(name=name, help=help, default=default, kept=kept)


def _ours(name: str, help: str) -> Variable:
    return Variable(name=name, help=help, set_by="us")


VARIABLES = (
    _yours("HPC_SERVE_HOME", "The shared folder of services.", "`~/.hpc-serve`"),
    _yours(
        "HPC_SERVE_ENV",
        "The virtual environment that scripts activate.",
        "`.venv` in the folder of submission",
        kept=True,
    ),
    _yours("HPC_SERVE_SITE", "Your site file.", "`~/.config/hpc-serve/site.yaml`"),
    _yours(
        "HPC_SERVE_SYSTEM_SITE",
        "The site file of the whole system, which is read before yours. Empty: there is none.",
        "`/etc/hpc-serve/site.yaml`, if it exists",
    ),
    _yours(
        "HPC_SERVE_MODEL",
        "A folder in place of the model's weights, for staged copies, other checkpoints, or tests. Arguments in its "
        "`hpc-serve-args.txt` are appended. Arguments that name code or open the engine are refused there: they are "
        "taken from a command line or script alone.",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_LOG_DIR",
        "Where logs go; `--log-dir` wins. It may have Slurm's `%x`, `%u`, `%j`, `%A`, `%a`. Files in it are named "
        "after the job.",
        "`logs/` in the service's folder",
    ),
    _yours(
        "HPC_SERVE_INTERFACE",
        "The network interface between nodes.",
        "the one of the host name",
        kept=True,
    ),
    _yours("HPC_SERVE_TMPDIR", "The root of the private node-local folder.", "`/tmp`", kept=True),
    _yours(
        "HPC_SERVE_CACHE_DIR",
        "A node-local folder for compiled code, which outlives the job.",
        "`hpc-serve-cache-<your user number>` in `HPC_SERVE_TMPDIR`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_CACHE_SIZE",
        "How much all compiled code may take on a node. `0` keeps nothing.",
        "`10GiB`, and a 20th of that filesystem at most",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_CACHE_ARCHIVE_SIZE",
        "How much archives of compiled code may take in `HPC_SERVE_HOME`, for nodes that have none. `0` writes and "
        "reads none.",
        "`1GiB`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_STAGE",
        "`on`, or the node-local folder to which the model is copied first. `off`: nowhere.",
        "`off`",
    ),
    _yours(
        "HPC_SERVE_PREFLIGHT",
        "`on`: the nodes are looked at before the engine starts. `warn`: no finding ends the start. `off`: nothing is "
        "looked at.",
        "`on`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_JOIN_S",
        "How long the first node waits while no further node joins, in seconds.",
        "`300`",
    ),
    _yours("HPC_SERVE_STALL_S", "How long a start may show no progress, in seconds.", "`1800`", kept=True),
    _yours(
        "HPC_SERVE_SILENCE_S",
        "How long the nodes of a job may not hear of each other before the job ends, in seconds: 5 to 3600.",
        "`60`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_CANARY_S",
        "How long a step of the engine may take in any case, and how long the engine may leave `/health` unanswered, "
        "in seconds, before it counts as hung. Long prompts justify a longer step. `0`: nobody asks.",
        "`5`; on CPUs `30`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_STEP_S",
        "How long a step of the engine may take at most, in seconds, whatever its prompts justify, and while a kernel "
        "is compiled.",
        "`300`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_HANG_S",
        "How long an engine may be unresponsive before it is ended and started again, in seconds.",
        "`60`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_KILL_WAIT_S",
        "The cluster's `KillWait`, in seconds. Requests under way have 8 less than that after SIGTERM.",
        "`30`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_ADD_AFTER_S",
        "Seconds that requests must wait before a replica is added (`--replicas MIN:MAX`).",
        "`20`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_LEAVE_AFTER_S",
        "Seconds that the other replicas must have been able to carry the load before one leaves "
        "(`--replicas MIN:MAX`).",
        "`600`",
        kept=True,
    ),
    _yours(
        "HPC_SERVE_QUANTIZE_ENV",
        "The virtual environment that `hpc-serve quantize` runs in: it has llm-compressor.",
        "`~/hpc-serve-quantize`",
    ),
    _yours("HPC_SERVE_DEBUG", "`1`: a command that meets a bug in hpc-serve prints the place."),
    _yours(
        "HF_HOME",
        "The Hugging Face cache, as its own tools take it: the engine loads weights from there, and a token there is "
        "used.",
        "`~/.cache/huggingface`",
        kept=True,
    ),
    _yours("HF_TOKEN", "The hub's token. The engine gets it; it is written nowhere."),
    _yours(
        "HF_HUB_OFFLINE",
        "`1`: the hub is not asked, neither by you nor by jobs. `TRANSFORMERS_OFFLINE` says the same.",
    ),
    _yours("HF_ENDPOINT", "Another address of the hub: a mirror.", "`https://huggingface.co`"),
    _ours("HPC_SERVE_CLUSTER", "`slurm` or `local`: where the job runs."),
    _ours("HPC_SERVE_JOB_ID", "The job's id, as records have it."),
    _ours("HPC_SERVE_JOB_DIR", "The private folder of this run in `HPC_SERVE_HOME`."),
    _ours("HPC_SERVE_NODE_TMP", "The private folder of this run on the node."),
    _ours("HPC_SERVE_HEAD_ADDRESS", "The address of the first node."),
    _ours("HPC_SERVE_ATTEMPTS_LEFT", "How often the script tries again where a port is taken."),
    _ours("HPC_SERVE_DRAIN_REQUEST", "The file that asks this replica to finish its requests and end."),
    _ours("HPC_SERVE_API_KEY_FILE", "For the gate in the engine: the file of the service's key."),
    _ours("HPC_SERVE_DRAIN_FILE", "For the gate in the engine: once this file exists, new requests are refused."),
    _ours("HPC_SERVE_ENGINE_SOCKET", "For the gate in the engine: where it gets the socket that it serves on."),
    _ours("HPC_SERVE_RUN_MARK", "On every child of a launcher: its run."),
    _ours("HPC_SERVE_ENGINE_MARK", "On every process of an engine: its start."),
    _ours("RAY_AUTH_MODE", "For Ray: `token`."),
    _ours("RAY_AUTH_TOKEN_PATH", "For Ray: the file of its token."),
    _ours("SPT_NOENV", "For vLLM and Ray: the titles that they give their processes leave the marks above readable."),
)
KEPT = tuple(variable.name for variable in VARIABLES if variable.kept)
"""What a script that is submitted again shall find in its environment as it did the first time."""
