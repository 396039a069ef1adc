#!/bin/bash
# Makes a root of Debian 13 whose Slurm has Pyxis, with Enroot: pyxis_root.sh FOLDER BASE PYXIS ENROOT. BASE is a root
# that debian_root.sh has made. PYXIS and ENROOT are the repositories of the sources, which are built in the new root.
# Enroot's makefile would build a C library, kernel headers and makeself, too. Debian's take their place.
# Its hook for cgroups is left out: it fails on a machine that has both versions, as the test machine.
set -euo pipefail
folder=$1 base=$2 pyxis=$3 enroot=$4
made_as="$(cat "$base/.suite") $(cksum < "$0")"
[[ $(cat "$folder/.suite" 2> /dev/null) == "$made_as" ]] && exit 0
echo "making a root with Pyxis and Enroot in $folder (700 MB, two minutes; remove it with rm -r) …"
rm -rf "$folder"
cp --archive --reflink=auto "$base" "$folder"
chroot "$folder" env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
    gcc libc6-dev make libslurm-dev jq parallel pigz zstd squashfs-tools bsdextrautils > /dev/null
mkdir "$folder/src"
git -c advice.detachedHead=false clone --quiet --branch=v0.24.0 "$pyxis" "$folder/src/pyxis"
git -c advice.detachedHead=false clone --quiet --branch=v4.1.2 "$enroot" "$folder/src/enroot"
chroot "$folder" bash -euo pipefail > /dev/null << 'END'
make -C /src/pyxis
install -D -m 644 /src/pyxis/spank_pyxis.so /usr/lib/pyxis/spank_pyxis.so
cd /src/enroot
make -C deps libbsd FORCE_GLIBC=1 CC=gcc
tools=(bin/enroot-{aufs2ovlfs,mksquashovlfs,mount,switchroot,nsenter})
make --old-file=deps FORCE_GLIBC=1 prefix=/usr sysconfdir=/etc enroot "${tools[@]}" 2> /dev/null
install enroot "${tools[@]}" /usr/bin
install -D -m 644 -t /usr/lib/enroot src/*.sh
install -D -m 755 -t /etc/enroot/hooks.d conf/hooks/*.sh
rm /etc/enroot/hooks.d/10-cgroups.sh
install -D -m 644 -t /etc/enroot/mounts.d conf/mounts/*.fstab
install -D -m 644 -t /etc/enroot/environ.d conf/environ/*.env
cat > /etc/enroot/enroot.conf << 'CONF'
ENROOT_RUNTIME_PATH /tmp/enroot-$(id -u)/runtime
ENROOT_CACHE_PATH   /tmp/enroot-$(id -u)/cache
ENROOT_DATA_PATH    /tmp/enroot-$(id -u)/data
CONF
mkdir -p /usr/share/pyxis
echo "required /usr/lib/pyxis/spank_pyxis.so" > /usr/share/pyxis/pyxis.conf
END
rm -rf "$folder"/var/cache/apt/archives/*.deb
echo "$made_as" > "$folder/.suite"
