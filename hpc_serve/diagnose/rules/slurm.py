"""What Slurm did to the job, in its own words in the logs and in those of `hpc-serve status`."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "time-limit",
        r"DUE TO TIME LIMIT|\(TIMEOUT\)",
        "the job reached its time limit",
        "Ask for more time (--time), or have the service go on in a new job: `hpc-serve submit --keep-up`.",
        pains=(25,),
    ),
    rule(
        "preempted",
        r"DUE TO PREEMPTION|\(PREEMPTED\)",
        "a job of higher priority took the nodes",
        "Use a partition or QOS that is not preempted, or --keep-up, or --requeue where the site allows it.",
        pains=(25,),
    ),
    rule(
        "node-failed",
        r"DUE TO NODE FAILURE|[Nn]ode failure on|\(NODE_FAIL\)|NODE FAIL|\(BOOT_FAIL\)",
        "a node of the job failed",
        "Submit again, without that node if Slurm still offers it (#SBATCH --exclude=NODE).",
        pains=(11,),
    ),
    rule(
        "unkillable",
        r"DUE TO JOB NOT ENDING WITH SIGNALS|STEP NOT ENDING WITH SIGNALS",
        "processes of the job did not end at Slurm's signals",
        "They hang in the kernel, in a filesystem or a driver. Tell your site's administrators the node's name.",
        pains=(20,),
    ),
    rule(
        "step-not-created",
        r"Unable to create step for job|Unable to confirm allocation",
        "srun could not start the launchers",
        "The job's options and srun's must agree (nodes, tasks, GPUs, memory). `hpc-serve render` writes both, with "
        "one task a node.",
        pains=(19,),
    ),
    rule(
        "step-waits",
        r"step creation (?:still|temporarily) disabled, retrying",
        "srun waits: other steps of the job hold the resources that it asks for",
        "Add --overlap to srun's options, or end the other step.",
        kind="symptom",
        in_notes=True,
        pains=(19,),
    ),
    rule(
        "nodes-left-out",
        r"can't run \d+ processes on \d+ nodes, setting nnodes to \d+",
        "srun started launchers on fewer nodes than the job has",
        "One task a node: --ntasks-per-node=1 and --nodes of srun as the script has them.",
        kind="symptom",
        in_notes=True,
        pains=(15,),
    ),
    rule(
        "gres-refused",
        r"[Ii]nvalid generic resource|Invalid gres",
        "Slurm does not know GPUs by the name that the job gives them",
        "gpu_directive and gres_type in the site file say how this site names them; `sinfo -o %G` lists the names.",
    ),
    rule(
        "clocks-differ",
        r"[Cc]redential expired|Munge decode failed: (?:Expired|Rewound) credential",
        "the clocks of two nodes differ too much for Slurm",
        "Leave the node out (#SBATCH --exclude=NODE) and tell your site's administrators.",
    ),
    rule(
        "job-credential",
        r"Invalid job credential|Error generating job credential",
        "Slurm's daemons do not trust each other's credentials",
        "A node's clock, munge key or user list differs from the others': leave it out (#SBATCH --exclude=NODE) and "
        "tell your site's administrators.",
        pains=(19,),
    ),
    rule(
        "munge-away",
        r"Munge (?:encode|decode) failed: (?:Failed to (?:access|connect to)|Socket communication)",
        "munge, by which Slurm knows users, does not answer on a node",
        "Leave the node out (#SBATCH --exclude=NODE) and tell your site's administrators.",
    ),
    rule(
        "log-folder-not-there",
        r"task (?P<task>\d+) launch failed: Slurmd could not connect IO",
        "the node of task {task} could not open its log: it does not see the folder of logs, or may not write to it",
        "The folder of logs (HPC_SERVE_LOG_DIR, else in HPC_SERVE_HOME or ~/.hpc-serve) must be on a filesystem of all "
        "nodes. `srun ls -ld ~` in a job shows which node lacks it; leave that out with #SBATCH --exclude=NODE.",
        pains=(19,),
    ),
    rule(
        "launch-failed",
        r"Task launch for \S+ failed on node (?P<node>[^:]+): |task \d+ launch failed: ",
        "Slurm could not start a launcher[[ on {node}]]",
        "Try `srun hostname` on the same nodes. A node that fails is left out with #SBATCH --exclude=NODE; slurmd's "
        "log there says more.",
        pains=(19,),
    ),
    rule(
        "crashed",
        r"task [\d,-]+: (?:Segmentation fault|Aborted|Illegal instruction|Floating point exception)"
        r"|Fatal Python error: |SIGSEGV(?! or SIGBUS)|Segmentation fault|Illegal instruction|\(core dumped\)|"
        r"exited with (?:132|139)\b",
        "a process crashed in compiled code",
        "The lines above the crash name the library. `Illegal instruction` means a build for another CPU.",
        kind="symptom",
    ),
    rule(
        "killed",
        r"task [\d,-]+: Killed|line \d+: +\d+ Killed|exited with (?:code )?137\b",
        "a process was killed (SIGKILL)",
        "Mostly the kernel does so for memory: compare `sacct -j JOB -o State,MaxRSS` with what was asked for, and ask "
        "for "
        'more (`mem: "0"` in the site file).',
        kind="symptom",
        pains=(18,),
    ),
    rule(
        "cancelled",
        r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*|\(CANCELLED\)",
        "the job or its step was cancelled",
        "scancel, `hpc-serve stop`, or the end of another part of the job did it.",
        kind="consequence",
    ),
)
