#!/usr/bin/env bash
# Runs the live DAX tests in a virtual machine with two emulated NVDIMMs: one becomes a DAX device,
# one carries ext4 on a DAX mount. Nothing of this host's memory or disks is touched.
#
#   scripts/dax-vm.sh           devices with pages of 2 MiB
#   ALIGN=4K scripts/dax-vm.sh  another alignment: 4K, 2M
#
# The machine is emulated in software, which is fast enough and also works where this host is itself
# a virtual machine.
#
# Needs a Debian or Ubuntu host on x86-64, 2 GiB of memory, and root once, to install QEMU. Takes some
# ten seconds after the download and the build. It is not part of check.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

ALIGN=${ALIGN:-2M}
NVDIMM_MIB=256
TIMEOUT_S=${TIMEOUT_S:-300}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

say() { printf '%s\n' "$*"; }
die() { say "dax-vm.sh: $*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || die "NVDIMMs are emulated for x86-64 only; this host is $(uname -m)"
command -v apt-get >/dev/null || die "apt-get is missing: this script installs Debian packages"

missing=()
for tool in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio ndctl:ndctl \
    mkfs.ext4:e2fsprogs; do
    command -v "${tool%%:*}" >/dev/null || missing+=("${tool#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    [ "$(id -u)" -eq 0 ] || die "run as root, or: apt-get install ${missing[*]}"
    apt-get install -y --no-install-recommends "${missing[@]}" >"$WORK/apt.log" 2>&1 || {
        cat "$WORK/apt.log"
        die "cannot install ${missing[*]}: is the package list current? apt-get update"
    }
fi

# The kernel of the machine is unpacked and never installed.
kernel=$(apt-cache depends linux-image-amd64 linux-image-generic 2>/dev/null |
    awk '/Depends: linux-image-[0-9]/ {print $2; exit}')
[ -n "$kernel" ] || die "no kernel package is known: apt-get update"
say "downloading $kernel"
(cd "$WORK" && apt-get download "$kernel" >apt.log 2>&1) || { cat "$WORK/apt.log"; die "no kernel"; }
dpkg-deb -x "$WORK"/*.deb "$WORK/kernel"
rm "$WORK"/*.deb
version=$(ls "$WORK/kernel/lib/modules")
busybox depmod -b "$WORK/kernel" "$version"

say "building the tests"
binaries=$(cargo test --locked -p uzone-os --test live -p uzone-zone --test regions --no-run \
    --message-format=json | grep -oE '"executable":"[^"]+"' | cut -d'"' -f4)
[ -n "$binaries" ] || die "cargo built no test"

say "making the initial file system"
root="$WORK/root"
mkdir -p "$root"/{bin,sbin,dev,proc,sys,tmp,mnt,tests,etc/ndctl}
cp "$(command -v busybox)" "$root/bin/busybox"
# Takes a program along with the libraries that it is linked with.
take() {
    cp "$1" "$2"
    # A static program has none, and ldd fails.
    { ldd "$1" 2>/dev/null || true; } | grep -oE '/[^ ]+' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -Ln "$library" "$root$library"
    done
}
take "$(command -v ndctl)" "$root/bin/ndctl"
take "$(PATH=$PATH:/sbin:/usr/sbin command -v mkfs.ext4)" "$root/bin/mkfs.ext4"
for binary in $binaries; do
    name=$(basename "$binary")
    take "$binary" "$root/tests/${name%-*}"
done
# Modules in the order in which they need each other.
modules="$WORK/kernel/lib/modules/$version"
needed=()
for module in nfit nd_pmem dax_pmem device_dax crc32c_generic ext4; do
    line=$(grep "/$module\.ko[.a-z]*:" "$modules/modules.dep") || die "$kernel has no module $module"
    read -ra files <<<"${line/:/ }"
    for ((i = ${#files[@]} - 1; i >= 0; i--)); do
        [[ " ${needed[*]-} " == *" ${files[i]} "* ]] || needed+=("${files[i]}")
    done
done
for file in "${needed[@]}"; do
    mkdir -p "$root/modules"
    cp "$modules/$file" "$root/modules/"
    printf '%s\n' "/modules/$(basename "$file")" >>"$root/modules/order"
done

cat >"$root/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin TMPDIR=/tmp RUST_BACKTRACE=1
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir /dev/shm
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
run() {
    echo "+ \$*"
    "\$@" && return
    echo "dax-vm: FAILED: \$*"
    poweroff -f
}
while read -r module; do run insmod "\$module"; done </modules/order
run ndctl create-namespace --force --reconfig=namespace0.0 --mode=devdax --align=$ALIGN --map=mem
run ndctl create-namespace --force --reconfig=namespace1.0 --mode=fsdax --map=mem
run mkfs.ext4 -q -b 4096 /dev/pmem1
run mount -t ext4 -o dax=always /dev/pmem1 /mnt
ls -l /dev/dax*
export REQUIRE_DAX=1 DAX_DIR=/mnt
run /tests/live dax:: --nocapture --test-threads=1
run /tests/live adopt:: --test-threads=1
run /tests/regions --nocapture --test-threads=1
echo "dax-vm: PASSED"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) >"$WORK/initrd"

say "booting $version, output follows"
timeout "$TIMEOUT_S" qemu-system-x86_64 \
    -machine "q35,nvdimm=on,accel=tcg" -cpu max -smp 2 -m 1G,slots=2,maxmem=4G \
    -object "memory-backend-ram,id=memory0,size=${NVDIMM_MIB}M" \
    -device nvdimm,id=nvdimm0,memdev=memory0 \
    -object "memory-backend-ram,id=memory1,size=${NVDIMM_MIB}M" \
    -device nvdimm,id=nvdimm1,memdev=memory1 \
    -kernel "$WORK/kernel/boot/vmlinuz-$version" -initrd "$WORK/initrd" \
    -append "console=ttyS0 quiet panic=-1" \
    -nographic -no-reboot -nic none </dev/null 2>&1 | tr -d '\r' | tee "$WORK/output" ||
    die "QEMU failed, or the machine ran for more than $TIMEOUT_S s"
grep -q '^dax-vm: PASSED' "$WORK/output" || die "the tests failed in the machine, see above"
