#!/bin/bash
# Serves deepseek-ai/DeepSeek-R1 as "r1": 2 replicas, each on 1 node x 8 GPUs (h200), DP=4 x TP=2 x PP=1.
# Rendered by hpc-serve 0.1.0: hpc-serve render --model r1 --nodes 2 --gpu h200 --target throughput --time 12:00:00 --signal B:USR1@120
# Change what you like below and submit it by hand: it needs no file but itself, and an environment (HPC_SERVE_ENV).
#SBATCH --job-name=hpc-serve-r1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=144G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --array=0-1
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append

set -euo pipefail
umask 077  # logs and private files are the owner's alone
export PYTHONSAFEPATH=1  # Python imports nothing from the folder of submission: others may write to it
# Python 3.10 does not read that. This leaves the folder out as well, and then refuses one that others may write to.
prepare='import sys; sys.path[:] = filter(None, sys.path); import hpc_serve.job.prepare as it; sys.exit(it.main())'
# Slurm opened this script's log with the umask of whoever submitted it.
for log in /proc/self/fd/1 /proc/self/fd/2; do [[ ! -f $log ]] || chmod go= "$log"; done
# srun refuses another job's variables of memory beside this one's: sbatch hands on those of a job that it runs in.
[[ -z ${SLURM_MEM_PER_NODE:-} ]] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU

# The Python environment, with hpc-serve and vLLM in it.
environment=${HPC_SERVE_ENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
if [[ ! -r $environment/bin/activate ]]; then
    echo "hpc-serve: no Python environment in $environment; set HPC_SERVE_ENV to one that has hpc-serve and vLLM" >&2
    exit 78
fi
if [[ -z ${HPC_SERVE_ENV:-} && $(stat -Lc %u "$environment/bin/activate") != @(0|"$EUID") ]]; then
    echo "hpc-serve: $environment belongs to another user, so nothing in it is run; set HPC_SERVE_ENV to use it" >&2
    exit 78
fi
# shellcheck disable=SC1091
source "$environment/bin/activate"

# At a signal the launcher finishes the requests under way, then ends; this shell waits for it.
cancelled='' launcher=''
# Before the time limit, and before a preemption where the site has it so, Slurm sends USR1 to this shell alone. At TERM,
# srun would kill the launcher at once; scancel of the whole job sends TERM to the launcher, too.
trap 'cancelled=yes
    echo "{\"by\": \"Slurm, before the time limit or a preemption, or scancel --batch\", \"deadline_s\": 100}" \
        >"${HPC_SERVE_DRAIN_REQUEST:-/dev/null}" || true' USR1 TERM INT

# A port that was taken between choosing and using it ends the run with 75; then it starts again with others.
for attempt in 1 2 3; do
    export HPC_SERVE_ATTEMPTS_LEFT=$((3 - attempt))
    exports=$(python -c "$prepare" --service r1)
    eval "$exports"
    echo "hpc-serve: logs of this run are $HPC_SERVE_LOG_DIR/$HPC_SERVE_JOB_ID-node*.log"
    status=0 launcher=''
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap \
        --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=60 \
        --open-mode=append --output="$HPC_SERVE_LOG_DIR/$HPC_SERVE_JOB_ID-node%n.log" \
        python -m hpc_serve.job --service r1 --backend auto --gpus-per-node 8 -- \
        vllm serve deepseek-ai/DeepSeek-R1 \
            --served-model-name deepseek-ai/DeepSeek-R1 r1 \
            --tensor-parallel-size 2 \
            --pipeline-parallel-size 1 \
            --max-model-len 163840 \
            --data-parallel-size 4 \
            --enable-expert-parallel \
        &
    launcher=$!
    # A signal that came before there was a launcher is passed on now.
    [[ -z $cancelled ]] || kill -TERM "$launcher" || true
    # A signal ends `wait` before the launcher has ended.
    while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
    wait "$launcher" || status=$?
    [[ $status -ge 0 ]] || status=0  # -1: bash lost it to a signal; a launcher that is told to end ends with 0
    [[ $status -eq 75 && -z $cancelled ]] || break
    echo "hpc-serve: attempt $attempt met a port or folder in use; choosing others" >&2
done
exit "$status"
