#!/bin/bash
# Makes a root of a later Debian by debootstrap: debian_root.sh FOLDER SUITE. It has Slurm, Charliecloud and Python with
# what a job of hpc-serve needs, so that it can be an image, too. Done once; a finished one stays.
# The mirror is the one that apt has on this machine (DEBIAN_MIRROR names another).
set -euo pipefail
folder=$1 suite=$2
made_as="$suite $(cksum < "$0")"  # a root that another state of this file made is made anew
[[ $(cat "$folder/.suite" 2> /dev/null) == "$made_as" ]] && exit 0
[[ $(id -u) -eq 0 ]] || { echo "$0 needs root" >&2; exit 1; }
"$(dirname "$0")/../../envs/packages.sh" debootstrap
# shellcheck disable=SC2016  # apt's own variable
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | head -n 1)}
echo "making a root of Debian $suite in $folder (300 MB, one to four minutes; remove it with rm -r) …"
rm -rf "$folder"
mkdir -p "$folder"
packages=slurm-wlm,munge,iproute2,charliecloud-runtime,python3,curl
debootstrap --variant=minbase --include="$packages" "$suite" "$folder" "$mirror" > "$folder.log" 2>&1 ||
    { tail -n 20 "$folder.log" >&2; exit 1; }
# Not by debootstrap, which does not find what provides a virtual package (python3-cffi-backend-api-min).
# A mirror may be a snapshot past its release's date, which debootstrap does not mind; the signature is checked all the same.
chroot "$folder" apt-get -qq -o Acquire::Check-Valid-Until=false update
chroot "$folder" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends python3-cryptography > /dev/null
# Apptainer is a package of the unstable branch alone (sid). It and podman-hpc mount an image file by squashfuse.
if chroot "$folder" apt-cache show apptainer > /dev/null 2>&1; then
    chroot "$folder" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install --yes --no-install-recommends apptainer squashfuse squashfs-tools fuse2fs \
        podman crun fuse-overlayfs inotify-tools > /dev/null
fi
rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder.log"
echo "$made_as" > "$folder/.suite"
