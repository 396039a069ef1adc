"""Ray: its start, its nodes, its placement of workers."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "unique-address",
        r"Every node should have a unique IP address",
        "vLLM sees several nodes under one address",
        "Each node must give Ray and vLLM the same address of its own: leave VLLM_HOST_IP unset, and name the network "
        "by "
        "HPC_SERVE_INTERFACE if the nodes have several.",
        pains=(1,),
    ),
    rule(
        "no-placement",
        r"Cannot provide a placement group|No available node types can fulfill resource request|"
        r"Ray does not allocate any GPUs on the driver node|[Pp]lacement group .*timed out|"
        r"You don't have enough GPUs available in a current node",
        "Ray has fewer GPUs than the engine asks for, or on other nodes than it asks for",
        "Tensor times pipeline parallel size must be the job's number of GPUs, and each node must have joined: "
        "`hpc-serve logs` "
        "shows who has.",
        pains=(2, 15),
    ),
    rule(
        "waits-for-placement",
        r"Waiting for creating a placement group",
        "the engine waits for GPUs that Ray does not have",
        "Tensor times pipeline parallel size must be the job's number of GPUs, and each node must have joined Ray.",
        kind="symptom",
        in_notes=True,
        pains=(2,),
    ),
    rule(
        "others-ray-folder",
        r"Permission denied:? '?/tmp/_?ray",
        "/tmp/ray on the node belongs to another user",
        "Give Ray a folder of its own (`ray start --temp-dir`); the launcher does. Unset RAY_TMPDIR if it is set.",
        pains=(6,),
    ),
    rule(
        "socket-path-too-long",
        r"AF_UNIX path (?:length cannot exceed|too long)|[Ss]ocket (?:path|name).* too long",
        "the temporary folder's path is too long for a socket of Ray or vLLM",
        "Set TMPDIR to a short path on the node, such as /tmp (43 characters at most).",
        pains=(7,),
    ),
    rule(
        "ray-token",
        r"InvalidAuthToken|[Aa]uthentication (?:token|failed).*[Rr]ay|RAY_AUTH_(?:MODE|TOKEN).*(?:mismatch|required|"
        r"not)",
        "a process came to Ray without the run's token, or with another one",
        "Unset RAY_AUTH_MODE and RAY_AUTH_TOKEN in your environment; the launcher gives each run a token of its own.",
        pains=(24,),
    ),
    rule(
        "ray-versions",
        r"Version mismatch: The cluster was started with",
        "the nodes have different versions of Ray or Python",
        "All nodes must use one environment: check HPC_SERVE_ENV, and what the shell's start-up files load.",
    ),
    rule(
        "ray-missing",
        r"Failed to import Ray|Ray is not installed|Please install Ray with|current platform \S+ does not support ray",
        "this environment has no Ray that vLLM can use",
        "Install Ray beside vLLM, or start without it: --backend mp.",
        pains=(16,),
    ),
    rule(
        "ray-unreachable",
        r"[Uu]nable to connect to GCS|[Ff]ailed to connect to (?:the )?GCS|Could not find any running Ray instance|"
        r"Failed to get (?:the )?(?:system config|cluster ID)|Timed out .*waiting for .*GCS|GCS .*(?:is )?(?:dead|"
        r"unavailable)|"
        r"Ray (?:cluster|processes) .*not (?:be )?(?:found|started)",
        "a node could not reach Ray's head",
        "The nodes must reach each other on the network that HPC_SERVE_INTERFACE names; a firewall between nodes, or a "
        "head that ended first, looks like this.",
        kind="symptom",
        in_notes=True,
        pains=(4,),
    ),
    rule(
        "ray-node-dead",
        r"has been marked dead because|NodeDiedError|missed too many heartbeats",
        "Ray lost a node",
        "The node is frozen, overloaded, or cut off from the network: look at its log and at `sinfo -R`.",
        kind="symptom",
        pains=(10, 11),
    ),
    rule(
        "ray-part-ended",
        r"\b(?P<part>\w+) \[exit code=(?P<code>-?\d+)\]",
        "Ray's {part} ended with {code}",
        "Code -9 means that it was killed, mostly for memory: compare `sacct -j JOB -o State,MaxRSS` with what was "
        "asked "
        "for. Otherwise the lines before it say more.",
        kind="symptom",
        pains=(5,),
    ),
    rule(
        "ray-actor-died",
        r"(?:ActorDiedError|RayActorError|WorkerCrashedError|ActorUnavailableError)|[Tt]he actor died unexpectedly|"
        r"Worker unexpectedly exits with a connection error",
        "a Ray worker process of the engine died",
        "Look for what killed it on its node: memory (Slurm's OUT_OF_MEMORY, `dmesg`), or a crash in compiled code.",
        kind="symptom",
        pains=(10,),
    ),
)
