#!/bin/bash
# The engine alone, on one node with as many ranks. Usage: sbatch --nodes=1 … bare.sh -- ENGINE COMMAND
set -euo pipefail
date +%s.%N >"$BEGAN_FILE"
[[ ${1:-} == -- ]] && shift
exec "$@"
