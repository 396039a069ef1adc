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
        "command-missing",
        r"(?P<command>[\w./-]+): command not found|(?:no|there is no) command (?P<name>\S+) (?:in this environment|"
        r"on a node)|"
        r"execve\(\): (?P<path>\S+): No such file",
        "there is no command [[{command}]][[{name}]][[{path}]] on a node",
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
