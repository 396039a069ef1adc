"""The network between the processes of an engine, and what one of them sees when another one is gone."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

_INTERFACE = (
    "Name the network that connects the nodes by HPC_SERVE_INTERFACE (`ip -br addr` in a job step lists them); "
    "GLOO_SOCKET_IFNAME "
    "and NCCL_SOCKET_IFNAME follow it."
)

RULES: tuple[Rule, ...] = (
    rule(
        "engine-out-of-reach",  # what `status` says
        r"ready by its record, but no answer from (?P<places>\S+(?:, \S+)*) to this machine: (?P<why>[^;()]+)",
        "ready by its record, but no answer from {places} to this machine: {why}",
        "Ask from a node of the cluster (`srun hpc-serve status`): if it answers there, a firewall keeps this machine "
        "from the nodes' ports. Then use it from jobs, or through `hpc-serve gateway` on a machine that both reach. If "
        "it answers nowhere, the node is lost.",
        kind="symptom",
        pains=(10,),
    ),
    rule(
        "no-interface",
        r"no socket interface found|[Uu]nable to find (?:address|interface) for: \S+|"
        r"Bootstrap : (?:no|could not find).*interface",
        "a node has no network interface of the name that was set",
        _INTERFACE,
        pains=(8, 9),
    ),
    rule(
        "not-this-nodes-address",
        r"Cannot assign requested address",
        "a process was told to listen on an address that its node does not have",
        "An address of one node reached another: unset VLLM_HOST_IP, VLLM_NIXL_SIDE_CHANNEL_HOST and MASTER_ADDR in "
        "your "
        "environment. The launcher sets each node's own.",
        pains=(1,),
    ),
    rule(
        "gloo-mesh",
        r"Gloo connectFullMesh failed|gloo/transport/tcp/\S+ (?:connect|timeout|no error)|Gloo .*timed out",
        "the engine's processes could not connect to each other by Gloo",
        _INTERFACE,
        kind="symptom",
        pains=(8,),
    ),
    rule(
        "nccl-network",
        r"ncclSystemError|NCCL error.*unhandled system error|unhandled system error|ncclRemoteError|"
        r"socketStartConnect|socketProgress.*(?:closed|refused|timed out)|Call to (?:connect|"
        r"bind).*(?:No route to host|refused|timed out)|"
        r"NET/(?:IB|Socket|OFI).*(?:error|failed|timed out)|Got completion from peer .* with (?:status|error)",
        "NCCL could not use the network between the GPUs",
        f"{_INTERFACE} NCCL_DEBUG=INFO shows which it takes; NCCL_IB_DISABLE=1 tells InfiniBand from the rest.",
        kind="symptom",
        pains=(9,),
    ),
    rule(
        "nccl-usage",
        r"ncclInvalidUsage|NCCL error.*invalid usage|ncclInvalidArgument|NCCL error.*invalid argument",
        "NCCL refuses what it was asked for",
        "NCCL_DEBUG=WARN names it: mostly an NCCL_SOCKET_IFNAME that a node does not have, or two ranks on one GPU.",
        kind="symptom",
        pains=(9, 17),
    ),
    rule(
        "nccl-timeout",
        r"[Ww]atchdog caught collective operation timeout(?:.{0,80}?OpType=(?P<operation>\w+))?.{0,300}?"
        r"ran for (?P<ms>\d+) milliseconds",
        "a rank waited {ms} ms for the others in a collective operation[[ ({operation})]]",
        "Another rank died or stands still; look at the other nodes' logs for what it met first. If none did, the "
        "network "
        "between the GPUs loses data.",
        kind="symptom",
        pains=(9,),
    ),
    rule(
        "nccl-gpu",
        r"ncclUnhandledCudaError|NCCL error.*unhandled cuda error",
        "NCCL met an error of a GPU",
        "NCCL_DEBUG=INFO names it. Often the GPU's memory is full, or /dev/shm is.",
        kind="symptom",
        pains=(9,),
    ),
    rule(
        "master-unreachable",
        r"client socket has (?:timed out|failed to connect)|wait timeout after \d+ ?ms|DistNetworkError|DistStoreError|"
        r"TCPStore.*(?:timed out|timeout|failed)|Timed out after \d+ seconds waiting for clients",
        "a node could not reach the first node's torch store in time",
        f"{_INTERFACE} A node whose engine ended first looks like this too.",
        kind="symptom",
        pains=(8, 16),
    ),
    rule(
        "network-unreachable",
        r"\[Errno (?:101|110|113)\]|No route to host|Network is unreachable|Connection timed out|"
        r"Name or service not known",
        "a node could not reach another machine",
        f"{_INTERFACE} A node without a way to the internet needs its files on the cluster.",
        kind="symptom",
        pains=(8,),
    ),
    rule(
        "port-in-use",
        r"[Aa]ddress already in use|EADDRINUSE|port \S+ is already (?:in use|used)|no free port left"
        r"|Port \d+ of \S+ was taken by another program|server is up, but another program answers",
        "a port was taken by another program",
        "The script starts again by itself, three times in all. --port, and VLLM_PORT and MASTER_PORT in your "
        "environment, name the same port each time: leave --port out, and unset the others.",
        kind="symptom",
        pains=(3, 22),
    ),
    rule(
        "node-silent",
        r"node (?P<node>\S+) has sent nothing for (?P<seconds>[\d.]+) s",
        "node {node} was silent for {seconds} s: it is frozen, lost, or cut off from the network",
        "Submit again, without that node (#SBATCH --exclude={node}). HPC_SERVE_SILENCE_S sets how long a node may be "
        "silent.",
        kind="symptom",
        pains=(10, 11),
    ),
    rule(
        "node-absent",
        r"(?P<missing>no launcher from node rank [\d, ]+|"
        r"(?<!\S)\S+ \([\d.:a-f]+\) has not joined)[^;]*within (?P<seconds>\d+) s",
        "a node did not take part: {missing} within {seconds} s",
        "Its log says why; without one, srun did not start its launcher (one task a node), or it cannot reach the "
        "first "
        "node on the network of HPC_SERVE_INTERFACE. HPC_SERVE_JOIN_S sets the time.",
        kind="symptom",
        pains=(2, 15),
    ),
    rule(
        "launcher-ended",
        r"launcher on node (?P<node>\S+) ended",
        "the launcher on {node} ended",
        "Its own log says why; without a word there, it was killed: memory, or the node.",
        kind="symptom",
        pains=(11,),
    ),
    rule(
        "engine-stalled",
        r"no progress for (?P<seconds>\d+) s while (?P<stage>[^:]+): the engine logs nothing new",
        "the engine stood still for {seconds} s while {stage}",
        "The filesystem of the weights may hang (`ls` there from the node), or a rank waits for another. "
        "HPC_SERVE_STALL_S "
        "sets how long this may last.",
        kind="symptom",
        pains=(13, 14),
    ),
    rule(
        "engine-hung",
        r"(?:was unresponsive for \d+ s|the engine hung): (?P<complaint>.+)",
        "the engine hung: {complaint}",
        "The launcher ends such an engine after HPC_SERVE_HANG_S and starts it again. If it happens again with the "
        "same "
        "model, try --enforce-eager, or another version of vLLM.",
        kind="symptom",
        pains=(10,),
    ),
    rule(
        "engine-process-killed",
        r"Failed core proc\(s\): \{[^}]*?'(?P<core>\w+)': -9\b|"
        r"Worker proc (?P<worker>\S+) died unexpectedly \(exit code: -9\)|[Ww]orker\S* .*died, exit code: -9\b",
        "a process of the engine was killed (SIGKILL)[[: {core}]][[: {worker}]]",
        "The kernel does so for memory (`sacct -j JOB -o State,MaxRSS`, `dmesg`), or another program or a person did.",
        kind="death",
        pains=(11, 18),
    ),
    rule(
        "engine-core-gone",
        r"MPClient: engine core exited unexpectedly",
        "the engine's core process ended without a word: it was killed (SIGKILL)",
        "The kernel does so for memory (`sacct -j JOB -o State,MaxRSS`, `dmesg`), or another program or a person did.",
        kind="symptom",
        in_notes=True,
        is_final=True,
        pains=(11, 18),
    ),
    rule(
        "worker-died",
        r"Worker proc \S+ died unexpectedly(?! \(exit code: (?:0|-6)\))|[Ww]orker\S* .*died, exit code: (?!0|-6)-?\d+",
        "a worker process of the engine died without a word",
        "It was killed, mostly for memory (Slurm's OUT_OF_MEMORY, `dmesg`), or crashed in compiled code.",
        kind="symptom",
        pains=(10,),
    ),
    rule(
        "worker-gave-up",  # SIGABRT: torch's watchdog ends the process, and says why
        r"Worker proc \S+ died unexpectedly \(exit code: -6\)|[Ww]orker\S* .*died, exit code: -6",
        "a worker process of the engine ended itself",
        "The lines around it say why.",
        kind="consequence",
    ),
    rule(
        "engine-timeout",
        r"Timed out waiting for engine (?:core )?process|Did not receive response from (?:front-end|engine)|"
        r"RPC call to \S+ timed out"
        r"|VLLM_ENGINE_READY_TIMEOUT_S",
        "a process of the engine waited too long for another one",
        "VLLM_ENGINE_READY_TIMEOUT_S and VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS in your environment shorten such waits: "
        "unset "
        "them. Otherwise another rank stands still.",
        kind="symptom",
        pains=(13,),
    ),
    rule(
        "peer-gone",
        r"Connection (?:closed|reset) by (?:peer|remote peer)|Broken pipe|EOFError|ConnectionResetError|"
        r"BrokenPipeError",
        "another process of the engine had gone away",
        "Look for what ended it in the logs of the other nodes.",
        kind="consequence",
        pains=(10,),
    ),
)
