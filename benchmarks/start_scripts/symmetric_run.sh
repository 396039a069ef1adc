#!/bin/bash
# The engine under Ray's own start of a cluster from one command on all nodes.
# Usage: sbatch --nodes=N … symmetric_run.sh -- ENGINE COMMAND
set -euo pipefail
date +%s.%N >"$BEGAN_FILE"
[[ ${1:-} == -- ]] && shift
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD_ADDRESS=$head:6379
# shellcheck disable=SC2016  # the shells of the nodes put the variables in
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap bash -c '
    export VLLM_HOST_IP=$(hostname --ip-address)
    exec ray symmetric-run --address "$HEAD_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" --num-gpus="$GPUS" -- "$@"
    ' node "$@"
