#!/bin/bash
# Makes .venv: hpc-serve (editable) and vLLM on CPUs, at the locked versions; with `dev`, what tests and checks need too.
# `unit` makes one for the Python that PYTHON names, with what unit tests need and no engine (envs/versions.sh).
# `docs` makes one with the programs that build the documentation site, `browser` one with that which looks at it,
# `podman-hpc` one with podman-hpc.
# pip takes no file whose SHA-256 is not in the locks, and asks no index but its own and one that TORCH_INDEX names.
# Installs again only what changed. Usage: envs/venv.sh [dev | unit | docs | browser | podman-hpc]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
what=${1:-}
torch_index=()
[[ -z ${TORCH_INDEX:-} ]] || torch_index=(--extra-index-url "$TORCH_INDEX")
umask 022 # other users run what is installed: jobs on the test cluster, colleagues on a shared one

fail() {
    echo "envs/venv.sh: $*" >&2
    exit 1
}

# An interpreter below a private home would leave other users with a .venv that they cannot run.
everybody_can_run() {
    local path
    path=$(readlink -f "$1")
    while [[ $path != / ]]; do
        [[ $(stat -c %A "$path") == *[xt] ]] || return 1
        path=$(dirname "$path")
    done
}

find_python() {
    local name path
    for name in ${PYTHON:-/usr/bin/python3.11 /usr/local/bin/python3.11 python3.11 python3}; do
        path=$(command -v "$name") || continue
        [[ $("$path" -c 'import sys; print(*sys.version_info[:2])') == "3 11" ]] || continue
        everybody_can_run "$path" || [[ -n ${PYTHON:-} ]] || continue
        echo "$path"
        return
    done
    fail "no Python 3.11 that every user can run: the locks in envs/ are for 3.11; install it, or name one with PYTHON="
}

stamp() { sha256sum "$@" | sha256sum | cut -c1-16; }

# install NAME FILE... : runs the function install_NAME unless it ran for these very files.
install() {
    local name=$1 want
    shift
    want=$(stamp "$@")
    [[ $(cat "$venv/.installed-$name" 2> /dev/null) == "$want" ]] && return
    rm -f "$venv/.installed-$name"
    echo "installing $name into $venv …"
    "install_$name"
    echo "$want" > "$venv/.installed-$name"
}

pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }

locked() {
    pip install --require-hashes --no-deps --only-binary :all: "$@" 2> "$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        return 1
    }
}

install_cpu() {
    locked "${torch_index[@]}" -r envs/cpu/lock.txt ||
        fail "pip could not install envs/cpu/lock.txt. The CPU build of torch is not on PyPI: if that is what pip did" \
            "not find, name the index of PyTorch's CPU builds with TORCH_INDEX=URL (envs/README.md has it)"
    pip install --no-deps --no-build-isolation ./envs/cpu/vllm-command
    rm -rf envs/cpu/vllm-command/build envs/cpu/vllm-command/*.egg-info
}

install_dev() {
    locked -r envs/dev/lock.txt
    pip install --no-deps --no-build-isolation ./tests/vllm_ray_on_cpu
    rm -rf tests/vllm_ray_on_cpu/build tests/vllm_ray_on_cpu/*.egg-info
    count_lines
}

install_docs() { locked -r envs/docs/lock.txt; }

install_browser() { locked -r envs/browser/lock.txt; }

install_podman-hpc() { locked -r envs/podman-hpc/lock.txt; }

install_unit() { locked -r envs/versions/lock.txt; }

# Programs that tests start count the lines that they run, where a variable asks for it.
count_lines() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    command install -m 644 tests/support/count_lines.py "$site/hpc_serve_count_lines.py"
    echo 'import hpc_serve_count_lines' > "$site/hpc_serve_count_lines.pth"
}

install_core() {
    pip install --no-deps --no-build-isolation --editable .
}

if [[ ! -x $venv/bin/pip ]]; then
    python=${PYTHON:-}
    [[ $what == unit ]] || python=$(find_python)
    if ! "$python" -c 'import ensurepip' 2> /dev/null; then
        envs/packages.sh python3-venv
    fi
    "$python" -m venv --clear "$venv"
fi
if [[ $what == @(docs|browser|podman-hpc) ]]; then
    install "$what" "envs/$what/lock.txt"
    exit
elif [[ $what == unit ]]; then
    install unit envs/versions/lock.txt
else
    install cpu envs/cpu/lock.txt envs/cpu/vllm-command/pyproject.toml
fi
if [[ $what == dev ]]; then
    install dev envs/dev/lock.txt tests/vllm_ray_on_cpu/pyproject.toml tests/vllm_ray_on_cpu/vllm_ray_on_cpu/*.py \
        tests/support/count_lines.py
fi
install core setup.cfg pyproject.toml
