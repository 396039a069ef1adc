"""GPUs and other accelerators: absent, broken, too old, or of another kind than the software."""

from __future__ import annotations

from hpc_serve.diagnose.rules.rule import Rule, rule

RULES: tuple[Rule, ...] = (
    rule(
        "gpu-faulty",
        r"uncorrectable ECC error|fallen off the bus|NVRM: Xid|CUDA error: unknown error|[Ss]ystem not yet initialized"
        r"|fabric manager|GPU is lost|hipErrorECCNotCorrectable",
        "a GPU of the job is faulty",
        "Leave the node out (#SBATCH --exclude=NODE) and tell your site's administrators; `nvidia-smi -q` on the node "
        "says more.",
    ),
    rule(
        "driver-too-old",
        r"CUDA driver version is insufficient|driver on your system is too old|compiled with an unsupported toolchain"
        r"|Error 80[34]: |forward compatibility was attempted|unsupported display driver",
        "the nodes' NVIDIA driver is too old for the CUDA of this environment",
        "`nvidia-smi` on a node says which CUDA it can do. Install a build of vLLM and torch for that one, or use "
        "nodes with a newer driver.",
    ),
    rule(
        "gpu-too-old",
        r"no kernel image is available for execution|Bfloat16 is only supported on GPUs|"
        r"[Mm]inimum (?:required )?(?:compute )?capability|requires? (?:GPUs? with )?compute capability",
        "the GPUs are of a generation that this model or build does not support",
        "Use newer GPUs (--constraint, --partition), or --dtype float16 or another quantization (after --).",
    ),
    rule(
        "gpu-busy",
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy|"
        r"TPU is already in use by (?:a )?process",
        "another program holds the GPU for itself",
        "Ask Slurm for GPUs in the job's own right (--gpus-per-node); look for what a dead job left: `nvidia-smi`.",
        pains=(17,),
    ),
    rule(
        "too-few-gpus",
        r"invalid device ordinal|World size \(\d+\) is larger than the number of available GPUs|"
        r"Attempting to start raylet with \d+ GPUs?, but |"
        r"exceeds the total number of available \w+ in the (?:placement group|cluster)|"
        r"(?:has|have) (?P<given>\d+) GPUs (?:of this job|"
        r"for each of the \d+ replicas of this job), the launcher was told",
        "the engine was told to use more GPUs than the job has on a node",
        "Make --gpus-per-node in the #SBATCH lines, the launcher's, and the tensor parallel size agree; `hpc-serve "
        "render` writes all of them.",
        pains=(17,),
    ),
    rule(
        "gpu-used-twice",
        r"Duplicate GPU detected",
        "several ranks were put on one GPU",
        "Leave CUDA_VISIBLE_DEVICES to Slurm and the launcher: unset it in your environment and in the script. Tensor "
        "times "
        "pipeline parallel size must be the job's number of GPUs.",
        pains=(17,),
    ),
    rule(
        "gpu-named-by-uuid",
        r"invalid literal for int\(\) with base 10: '(?P<device>(?:GPU|MIG)-[^']+)'",
        "this vLLM cannot read the name of a GPU in CUDA_VISIBLE_DEVICES: {device}",
        "Give it numbers (CUDA_VISIBLE_DEVICES=0,1), or use a vLLM that knows such names; parts of GPUs (MIG) have no "
        "numbers.",
        pains=(17,),
    ),
    rule(
        "ptxas-too-old",
        r"ptxas fatal\s*: Value '(?P<arch>sm_\w+)' is not defined",
        "the ptxas of this environment is older than the GPU ({arch})",
        "Set TRITON_PTXAS_PATH to the ptxas of a CUDA that knows the GPU (`ptxas --list`), or install a newer Triton.",
    ),
    rule(
        "libcuda-not-found",
        r"libcuda\.so cannot found",
        "Triton does not find the driver's library libcuda.so",
        "In a container, the driver must be bound (--nv); else set TRITON_LIBCUDA_PATH to the folder that has it "
        "(`ldconfig -p | grep libcuda`).",
        pains=(17,),
    ),
    rule(
        "cublas-not-started",
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        "cuBLAS could not start on a GPU, mostly for lack of memory on it",
        "`nvidia-smi` on the node shows what is left. Lower --gpu-memory-utilization (after --), or use more GPUs.",
        kind="symptom",
        pains=(23,),
    ),
    rule(
        "no-gpus",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|No HIP GPUs are available|"
        r"Failed to infer device type|Found no NVIDIA driver|Device string must not be empty|"
        r"Current node has no \w+ available",
        "the engine found no GPU on a node",
        "Check that the job asks for GPUs as this site wants it (gpu_directive and gres_type in the site file), that "
        "`nvidia-smi` works in a job step, and that a container gets --nv or --rocm.",
        pains=(17,),
    ),
    rule(
        "hip-visible-devices",
        r"Please use HIP_VISIBLE_DEVICES",
        "Ray refuses ROCR_VISIBLE_DEVICES, by which Slurm names AMD GPUs",
        "Unset ROCR_VISIBLE_DEVICES and set HIP_VISIBLE_DEVICES; the launcher does so unless both are set.",
        pains=(17,),
    ),
    rule(
        "cuda-fork",
        r"Cannot re-initialize CUDA in forked subprocess",
        "a process used CUDA before vLLM forked its workers",
        "Set VLLM_WORKER_MULTIPROC_METHOD=spawn.",
    ),
    rule(
        "gpu-kernel-failed",
        r"CUDA error: (?:an illegal (?:memory access|instruction)|device-side assert|misaligned|unspecified launch)|"
        r"illegal memory access was encountered|hipErrorIllegalAddress|Memory access fault by GPU",
        "a kernel failed on a GPU",
        "Try --enforce-eager and another attention backend (after --) to tell a kernel's bug from a faulty GPU; one "
        "that "
        "fails on one node alone is a faulty GPU.",
        pains=(12,),
    ),
    rule(
        "pipeline-eager-cpu",
        r"assert self\.intermediate_tensors is not None",
        "vLLM on CPUs cannot answer with pipeline parallelism and --enforce-eager",
        "Leave out --enforce-eager (and -O0), or use a pipeline parallel size of 1.",
        pains=(12,),
    ),
)
