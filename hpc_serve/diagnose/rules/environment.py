"""The software of a node: environments, libraries, compilers, containers, caches, rights."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "no-environment",
        r"no Python environment in (?P<folder>[^;]+)|Not a conda environment: (?P<conda>\S+)|Run 'conda init' before",
        "there is no Python environment[[ in {folder}]][[ in {conda}]]",
        "Set HPC_SERVE_ENV (or venv, conda or apptainer in the site file) to one that has hpc-serve and vLLM, on a "
        "filesystem that "
        "the "
        "nodes see.",
    ),
    rule(
        "module-not-loaded",
        r"Lmod has detected the following error|Unable to locate a modulefile for|module: command not found|"
        r"The following module\(s\) are unknown",
        "a module of the site file could not be loaded",
        "`module avail` on a node lists the names; `modules` in the site file holds those that are loaded.",
    ),
    rule(
        "compile-cache",
        r"[Ss]tale file handle|(?:FileNotFoundError|OSError|Device or resource busy).*(?:triton|inductor|"
        r"torch_compile_cache)",
        "processes met in one compile cache on a shared filesystem",
        "Keep caches on the node: unset VLLM_CACHE_ROOT, TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR, or point "
        "HPC_SERVE_CACHE_DIR at a local disk.",
        pains=(21,),
    ),
    rule(
        "read-only",
        r"(?:\[Errno 30\] )?Read-only file system(?:: '(?P<path>[^']+)')?",
        "a folder that must be written to is mounted read-only[[: {path}]]",
        "Caches go where HPC_SERVE_CACHE_DIR, HF_HOME and TMPDIR point; a container's own folders cannot be written "
        "to.",
        kind="error",
    ),
    rule(
        "filesystem-away",
        r"(?:\[Errno (?:5|107|108)\] )?(?:Transport endpoint is not connected|Input/output error|"
        r"Cannot send after transport endpoint shutdown)(?:: '(?P<path>[^']+)')?",
        "a filesystem of the node does not answer[[: {path}]]",
        "`ls` there from the node shows it. Leave the node out (#SBATCH --exclude=NODE) and tell your site's "
        "administrators.",
        kind="error",
    ),
    rule(
        "no-file-locks",
        r"\[Errno 37\]|No locks available|\[Errno 38\] Function not implemented",
        "a filesystem has no file locks, or they do not work now",
        "Point HF_HOME and HPC_SERVE_HOME at a filesystem that has them (Lustre mounted with flock, NFS with its lock "
        "daemon), or put the model into a folder and serve that.",
        kind="error",
    ),
    rule(
        "weights-not-mapped",
        r"No such device \(os error 19\)",
        "a file of the weights cannot be mapped into memory where it lies",
        "Copy the model to another filesystem. The same is said of a folder in the place of a file.",
        kind="error",
    ),
    rule(
        "no-compiler",
        r"Failed to find C compiler|fatal error: Python\.h: No such file|gcc: (?:error|command not found)|"
        r"Could not find nvcc|"
        r"CUDA_HOME environment variable is not set|Ninja is required|'ninja'",
        "a kernel must be compiled on the node, and a compiler or its files are missing there",
        "Load the compiler's module (modules in the site file), or run in a container that has one; --enforce-eager "
        "(after "
        "--) does without most.",
    ),
    rule(
        "container-failed",
        r"(?P<words>could not open image .+|container creation failed.*|while (?:loading|extracting) container.*)|"
        r"pyxis: (?:error|couldn't|failed)|enroot\S* .*\[ERROR\]|"
        r"slurmstepd: error: pyxis: ",
        "the container could not be started[[: {words}]]",
        "Try it in a job step: `srun apptainer exec IMAGE true` (or --container-image). The image must be on a "
        "filesystem that the nodes see.",
    ),
    rule(
        "wrong-libraries",
        r"undefined symbol: \S+|version `GLIBC\w*_[\d.]+' not found|operator torchvision::nms does not exist",
        "libraries of the environment do not fit together",
        "Install vLLM in an environment of its own, at the versions of `envs/`; `module purge` before it, since "
        "modules "
        "put other libraries first.",
        kind="error",
    ),
    rule(
        "modules-of-another-python",
        r"Missing parentheses in call to 'print'|bad magic number in|import numpy from\s+its source directory|"
        r"Python version mismatch: module was compiled for|No module named 'numpy\.core\._multiarray_umath'|"
        r"cannot import name '\w+' from partially initialized module 'encodings'|No module named 'encodings'",
        "Python imported modules that were made for another Python",
        "PYTHONPATH or PYTHONHOME, mostly of a module file, names packages of another Python: `echo $PYTHONPATH` where "
        "you submit. Leave that module out, or submit with --env PYTHONPATH= (`env` in the site file).",
        kind="error",
    ),
    rule(
        "library-missing",
        r"(?P<library>lib[\w.+-]+\.so[.\d]*): cannot open shared object file",
        "the node lacks the library {library}",
        "Load its module (modules in the site file), or install vLLM with its own CUDA libraries.",
        kind="error",
    ),
    rule(
        "module-missing",
        r"No module named '?(?P<module>[\w.]+)'?",
        "the job's Python has no module {module}",
        "Install it in the job's environment (HPC_SERVE_ENV), the one that all nodes use.",
        kind="error",
    ),
    rule(
        "launcher-not-found",  # Slurm's words: the launchers of the other nodes may run, and wait for this one
        r"(?:slurmstepd-(?P<node>[^\s:]+): error: )?execve\(\): (?P<path>\S+): (?:No such file|Permission denied)",
        "the launcher could not be started[[ on {node}]]: {path} is not there, or may not be run",
        "The Python environment must be on a filesystem that every node sees, at one path: HPC_SERVE_ENV, or venv, "
        "conda or a container in the site file. `srun ls -l $HPC_SERVE_ENV/bin/python` shows who lacks it.",
    ),
    rule(
        "command-missing",
        r"(?<![\w./-])(?P<command>[\w./-]+): command not found|"
        r"(?:no|there is no) command (?P<name>\S+) (?:in this environment|on a node)",
        "there is no command [[{command}]][[{name}]] on a node",
        "Install it in the job's environment, set HPC_SERVE_ENV, or load its module (modules in the site file).",
        kind="error",
    ),
    rule(
        "permission-denied",
        r"Permission denied(?:: '(?P<path>[^']+)')?",
        "this user may not use a file or folder[[: {path}]]",
        "`ls -ld` on the node shows whose it is. Caches go where HPC_SERVE_CACHE_DIR, HF_HOME and TMPDIR point.",
        kind="error",
    ),
)
