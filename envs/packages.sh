#!/bin/bash
# Installs those Debian packages of its arguments that are not there yet, as root or with sudo.
set -euo pipefail

missing=()
for package in "$@"; do
    [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2> /dev/null) == installed ]] ||
        missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    command -v sudo > /dev/null || {
        echo "envs/packages.sh: ${missing[*]} must be installed; run this as root: apt-get install ${missing[*]}" >&2
        exit 1
    }
    as_root=(sudo)
fi
echo "installing Debian packages: ${missing[*]} …"
"${as_root[@]}" apt-get -qq update
# A package that starts its daemon, as munge does, must not fail where there is no init system to start it with.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
    apt-get -qq install --yes --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" > /dev/null
