"""Ray: its start, its nodes, its placement of workers."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "unique-address",
        r"Every node should have a unique IP address|has the head's address (?P<address>\S+) as well",
        "several nodes have one address[[, {address}]]",
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
        r"AF_UNIX path (?:length cannot exceed|too long)|[Ss]ocket (?:path|name).* too long|"
        r"is longer than \d+ characters \(sizeof\(sockaddr_un",
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
        "gcs-gone",  # the launcher's own line: Ray's head does not reach what runs beside it
        r"ray head (?:failed|exited) .*a node could not reach Ray's head",
        "Ray's gcs_server ended on the head's node, or was killed, while Ray started",
        "Memory (`sacct -j JOB -o State,MaxRSS`), a limit of processes (`ulimit -u`), or another program's kill; the "
        "node's `JOB-node0-ray.log` has what it said last.",
        kind="death",
        pains=(4,),
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
        "ray-slow-start",
        r"The current node timed out during startup|GCS cannot find the node with node ID",
        "Ray's raylet did not start in time on a node",
        "The node's `JOB-nodeK-ray.log` has what the raylet said. On a busy node, RAY_raylet_start_wait_time_s=60 "
        "gives it more time.",
        kind="symptom",
        pains=(5,),
    ),
    rule(
        "ray-agent-ended",
        r"raylet exited immediately because one Ray agent failed, agent_name = (?P<agent>\w+)",
        "Ray's {agent} ended on a node, or could not start, and its raylet with it",
        "Mostly a limit of processes (`ulimit -u` in a job step), the job's memory, or a grpcio that is not Ray's; the "
        "node's `JOB-nodeK-ray.log` has what it said last.",
        kind="symptom",
        in_notes=True,
        is_final=True,
        pains=(5,),
    ),
    rule(
        "ray-worker-unregistered",
        r"Unable to register worker with raylet",
        "a process found no raylet on its node",
        "The raylet had ended, or never started: the node's `JOB-nodeK-ray.log` has what it said last.",
        kind="symptom",
        in_notes=True,
        pains=(5,),
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
        r"\b(?P<part>\w+) \[exit code=(?P<code>-\d+)\]",
        "Ray's {part} ended with {code}",
        "Code -9 means that it was killed, mostly for memory: compare `sacct -j JOB -o State,MaxRSS` with what was "
        "asked "
        "for.",
        kind="death",
        pains=(5,),
    ),
    rule(
        "ray-part-failed",
        r"\b(?P<part>\w+) \[exit code=(?P<code>\d+)\]",
        "Ray's {part} ended with {code}",
        "The node's `JOB-nodeK-ray.log` has what it said last. A raylet ends like this too where Ray's head has ended.",
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
