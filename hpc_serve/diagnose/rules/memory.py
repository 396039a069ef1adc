"""Memory and space: of GPUs, of nodes, of /dev/shm, of disks."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

_SMALLER = (
    "`hpc-serve plan` with the same options says what fits: a shorter --max-model-len, a smaller --max-num-seqs, "
    "or more GPUs."
)

RULES: tuple[Rule, ...] = (
    rule(
        "killed-for-memory",  # the launcher's own line, by the kernel's count
        r"(?P<words>the kernel has killed \d+ process(?:es)? of this job on \S+ for memory: [^;()]+)",
        "{words}",
        'Ask for more memory, or all of it: `mem: "0"` in the site file, #SBATCH --mem=0 in a script. What is in '
        "/dev/shm counts.",
        in_notes=True,
        pains=(18,),
    ),
    rule(
        "node-ran-out",  # the same
        r"the kernel has killed \d+ process(?:es)? on (?P<node>\S+) for memory meanwhile",
        "a process was killed while the kernel killed processes on {node} for memory",
        'Ask for all of a node\'s memory (`mem: "0"` in the site file) and for the node alone (--exclusive), so that '
        "other jobs take none of it.",
        pains=(18,),
    ),
    rule(
        "killed-by-others",  # the same
        r"(?P<words>the kernel has killed none for memory on (?P<node>[^:\s]+): [^;()]+)",
        "a process of the engine ended without a word of its own; {words}",
        "Look for who ends processes there: a guard of the site (earlyoom, systemd-oomd, limits of CPU time), or "
        "another program of yours. Submit again; `#SBATCH --exclude={node}` leaves the node out.",
        pains=(11,),
    ),
    rule(
        "gpu-memory-taken",
        r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired",
        "only {free} of {total} GiB of a GPU were free when the engine started",
        "Another program holds the GPU's memory: `nvidia-smi` on the node shows it. Ask Slurm for whole GPUs, or lower "
        "--gpu-memory-utilization (after --).",
        pains=(23,),
    ),
    rule(
        "cpu-memory-taken",
        r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on (?:startup|kv cache allocation) "
        r"is less than (?:desired CPU memory utilization|requested memory for kv) \((?:[\d.]+, )?(?P<asked>[\d.]+)",
        "the engine asks for {asked} GiB of the node's memory, and {free} of {total} GiB were free",
        "Other programs of the node hold the rest: ask for the node alone (--exclusive), or set "
        "--kv-cache-memory-bytes (after --) to less than what is free. Without it, vLLM takes "
        "--gpu-memory-utilization of the node's memory.",
        pains=(18,),
    ),
    rule(
        "kv-cache-too-small",
        r"max seq len \((?P<length>\d+)\).*larger than the (?:available KV cache memory \((?P<room>[\d.]+ GiB)\)"
        r"|maximum number of tokens that can be stored in KV cache \((?P<tokens>\d+)\))"
        r"(?:.*estimated maximum model length is (?P<fits>\d+))?",
        "the KV cache has no room for one request of {length} tokens",
        "Set a shorter --max-model-len[[ (vLLM estimates that {fits} fits)]], or use more GPUs: `hpc-serve plan` says "
        "how "
        "many.",
        pains=(23,),
    ),
    rule(
        "no-kv-cache",
        r"No available memory for the cache blocks",
        "the weights leave no memory for a KV cache on a GPU",
        f"{_SMALLER} A higher --gpu-memory-utilization (after --) helps where the GPU is the job's alone.",
        pains=(23,),
    ),
    rule(
        "gpu-out-of-memory",
        r"(?:CUDA|HIP) out of memory|OutOfMemoryError: (?!Task was)|Cuda failure.*'?out of memory"
        r"|(?:CUDA|HIP) error: out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU ran out of memory",
        f"{_SMALLER} If the plan says that it fits, look for another program on the GPU, or lower "
        "--gpu-memory-utilization (after --).",
        pains=(23,),
    ),
    rule(
        "node-memory-limit",
        r"[Dd]etected \d+ oom[-_]kill event|task [\d,-]+: Out Of Memory|\(OUT_OF_MEMORY\)|OOM Killed"
        r"|Exceeded job memory limit|exceeded memory limit",
        "the job used more memory of a node than it had asked Slurm for, and processes of it were killed",
        'Ask for more memory, or all of it: `mem: "0"` in the site file, #SBATCH --mem=0 in a script. /dev/shm '
        "and pinned buffers count.",
        pains=(18,),
    ),
    rule(
        "ray-memory-monitor",
        r"killed due to the node running low on memory|[Mm]emory on the node .* was .* which exceeds the memory usage "
        r"threshold|[Ww]orkers? .*killed .*\(OOM\)|ray\.exceptions\.OutOfMemoryError",
        "Ray killed a worker because the node ran low on memory",
        'Ask Slurm for more memory of each node (`mem: "0"` for all of it), or use more nodes.',
        pains=(18,),
    ),
    rule(
        "shared-memory-full",
        r"Bus error|(?<!SIGSEGV or )SIGBUS|exited with (?:code )?135\b|Error while creating shared memory segment|"
        r"No space left on device.*/dev/shm"
        r"|/dev/shm.*No space left on device|insufficient shared memory|unable to allocate shared memory",
        "a node's /dev/shm is full or too small",
        "`df -h /dev/shm` on the node shows it, `ls -l /dev/shm` whose files fill it. In a container, give it the "
        "host's "
        "/dev/shm; NCCL_SHM_DISABLE=1 does without it, slower.",
        pains=(18,),
    ),
    rule(
        "disk-full",
        r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
        "a disk is full, or a quota is used up",
        "`df -h` and `quota -s` show which. Caches go where HPC_SERVE_CACHE_DIR, HF_HOME and TMPDIR point.",
    ),
    rule(
        "locked-memory",
        r"ibv_(?:reg_mr|create_cq|create_qp|alloc_pd)\S* failed.*(?:Cannot allocate memory|error 12)"
        r"|(?:Call to )?ibv_\w+ failed with error Cannot allocate memory|max locked memory",
        "InfiniBand could not lock memory",
        "The limit of locked memory is too low inside the job: `srun bash -c 'ulimit -l'` must say unlimited. Ask your "
        "site's administrators (PropagateResourceLimitsExcept=MEMLOCK).",
        pains=(9,),
    ),
    rule(
        "node-memory",
        r"MemoryError\b|\[Errno 12\]|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc",
        "a node has no more memory for the job",
        'Ask for more, or all of it: `mem: "0"` in the site file, #SBATCH --mem=0 in a script.',
        pains=(18,),
    ),
    rule(
        "too-many-threads",
        r"can't start new thread|pthread_create failed|blas_thread_init.*Resource temporarily unavailable"
        r"|fork: (?:retry: )?Resource temporarily unavailable|BlockingIOError: \[Errno 11\]",
        "the node lets this user start no more processes or threads",
        "`ulimit -u` and the job's pids limit bound them. Set OMP_NUM_THREADS=1, ask for more CPUs, or do not share "
        "the "
        "node (--exclusive).",
        pains=(5,),
    ),
    rule(
        "too-many-files",
        r"Too many open files|\[Errno 24\]",
        "a process had too many files open",
        "Raise the limit before the launcher starts: `ulimit -n 65536` in the script.",
    ),
)
