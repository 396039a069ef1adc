#!/bin/bash
# Runs the unit tests under each further Python that this machine has, without an engine: what needs vLLM, Ray or
# matplotlib is skipped, and so are the accuracy studies, which are arithmetic alone. Python 3.11 is `make test`'s.
# Usage: envs/versions.sh [--first-cases] [VERSION ...]    default: 3.10 3.12 3.13 3.14
# With --first-cases a parametrised test runs with its first case alone: another Python takes the same way through all.
# The tests of plan/, which are arithmetic alone, are left out then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A Python on PATH, or one of pyenv's.
find_version() {
    local path
    for path in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        "$path" -c 'import ensurepip, ssl, sqlite3' 2> /dev/null || continue
        [[ $("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])') == "$1" ]] || continue
        echo "$path"
        return
    done
}

cases=()
if [[ ${1-} == --first-cases ]]; then
    cases=("$1" --ignore=tests/unit/plan)
    shift
fi
[[ $# -gt 0 ]] || set -- 3.10 3.12 3.13 3.14
ran=() missing=() failed=()
for version in "$@"; do
    python=$(find_version "$version")
    if [[ -z $python ]]; then
        missing+=("$version")
        continue
    fi
    venv=.venv-$version
    VENV=$venv PYTHON=$python envs/venv.sh unit
    echo "unit tests under $("$venv/bin/python" --version):"
    if "$venv/bin/python" -m tests -q --numprocesses=auto --maxprocesses=4 \
        --ignore-glob='*/test_accuracy_*' "${cases[@]}" tests/unit; then
        ran+=("$version")
    else
        failed+=("$version")
    fi
done
echo "Python versions: passed under ${ran[*]:-none}; failed under ${failed[*]:-none}; not on this machine: ${missing[*]:-none}"
[[ ${#failed[@]} -eq 0 ]]
