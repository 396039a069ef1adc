#!/bin/bash
# The engine over Ray, as quickly as a script can: nothing sleeps, everything begins at once, nothing is checked.
# Usage: sbatch --nodes=N … fastest.sh [--gate] -- ENGINE COMMAND
# --gate: the engine waits for no Ray by itself, as a stub; then it begins when all nodes have joined.
set -euo pipefail
date +%s.%N >"$BEGAN_FILE"
gate=''
[[ ${1:-} == --gate ]] && { gate=yes; shift; }
[[ ${1:-} == -- ]] && shift
head_ip=$(hostname --ip-address)
export VLLM_HOST_IP=$head_ip RAY_ADDRESS=$head_ip:6379 RAY_prestart_worker_first_driver=0
options=(--block --disable-usage-stats --num-gpus="$GPUS" --object-store-memory=100000000)
ray start --head --port=6379 --node-ip-address="$head_ip" --include-dashboard=false "${options[@]}" &
others=$((SLURM_JOB_NUM_NODES - 1))
# shellcheck disable=SC2016  # the shells of the nodes put the variables in
srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --overlap bash -c '
    export VLLM_HOST_IP=$(hostname --ip-address)
    exec python "$SCRIPTS/ray_when.py" head -- start --address="$RAY_ADDRESS" --node-ip-address="$VLLM_HOST_IP" "$@"
    ' node "${options[@]}" &
if [[ -n $gate ]]; then
    python "$SCRIPTS/ray_when.py" "$SLURM_JOB_NUM_NODES" -- "$@" &
else
    "$@" &
fi
wait
