#!/bin/bash
# The engine after a Ray that is given time by sleeps, the form that most published scripts have.
# Usage: sbatch --nodes=N … sleeps.sh -- ENGINE COMMAND
set -euo pipefail
date +%s.%N >"$BEGAN_FILE"
[[ ${1:-} == -- ]] && shift
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap hostname --ip-address)
export RAY_ADDRESS=$head_ip:6379
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    ray start --head --block --node-ip-address="$head_ip" --port=6379 --num-gpus="$GPUS" &
sleep 10
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap ray start --block --address="$RAY_ADDRESS" --num-gpus="$GPUS" &
    sleep 5
done
VLLM_HOST_IP=$head_ip "$@"
