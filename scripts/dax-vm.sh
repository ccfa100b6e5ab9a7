#!/usr/bin/env bash
# Runs the tests that need DAX or two NUMA nodes in a virtual machine with three emulated NVDIMMs: one becomes a DAX device,
# one carries ext4 on a DAX mount, and one becomes a DAX device with pages of 1 GiB. `uzone-bench bind` describes each,
# the first by all alignments that it can have. Then the machine is killed while a test writes files, and a second boot
# finds what has lasted. Nothing of this host's memory or disks is touched.
#
#   scripts/dax-vm.sh           devices with pages of 2 MiB
#   ALIGN=4K scripts/dax-vm.sh  another alignment: 4K, 2M
#   KERNEL=FILE scripts/dax-vm.sh  the kernel of a Debian package, Linux 6.7 or newer
#
# The machine is emulated in software, which is fast enough and also works where this host is itself
# a virtual machine.
#
# Needs a Debian or Ubuntu host on x86-64, 2 GiB of memory, and root once, to install QEMU. Takes about two
# minutes after the download and the build. `./check.sh dax` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."

ALIGN=${ALIGN:-2M}
NVDIMM_MIB=256
# Whole pages of 1 GiB, of which those at multiples of that behind the other two are used.
HUGE_MIB=3072
TIMEOUT_S=${TIMEOUT_S:-600}
WORK=$(mktemp -d)
machine=
trap '[ -z "$machine" ] || kill -KILL "$machine" 2>/dev/null || true; rm -rf "$WORK"' EXIT

say() { printf '%s\n' "$*"; }
die() { say "dax-vm.sh: $*" >&2; exit 1; }
# What the host does not have is no failure of a test.
lacking() { say "dax-vm.sh: $*" >&2; exit 75; }

[ "$(uname -m)" = x86_64 ] || lacking "NVDIMMs are emulated for x86-64 only; this host is $(uname -m)"
command -v apt-get >/dev/null || lacking "apt-get is missing: this script installs Debian packages"

missing=()
for tool in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio ndctl:ndctl \
    mkfs.ext4:e2fsprogs; do
    command -v "${tool%%:*}" >/dev/null || missing+=("${tool#*:}")
done
# A host may never have fetched the list of packages.
install() {
    apt-get install -y --no-install-recommends "$@" ||
        { apt-get update && apt-get install -y --no-install-recommends "$@"; }
}
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    [ "$(id -u)" -eq 0 ] || lacking "run as root, or: apt-get install ${missing[*]}"
    install "${missing[@]}" >"$WORK/apt.log" 2>&1 || {
        cat "$WORK/apt.log"
        lacking "cannot install ${missing[*]}"
    }
fi

# The kernel of the machine is unpacked and never installed.
if [ -n "${KERNEL:-}" ]; then
    kernel=$KERNEL
    dpkg-deb -x "$KERNEL" "$WORK/kernel"
else
    # The kernel that a meta package of the sources, or of the list in the arguments, depends on.
    newest() {
        apt-cache "$@" depends linux-image-amd64 linux-image-generic 2>/dev/null |
            awk '/Depends: linux-image-[0-9]/ {print $2; exit}'
    }
    # uzone needs Linux 6.7.
    is_new() { printf '%s\n' linux-image-6.7 "$1" | sort -V -C; }
    sources=()
    kernel=$(newest)
    if ! is_new "$kernel" && site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | head -n 1); then
        # The backports of the release have a newer one. Their list is for this script alone.
        mkdir -p "$WORK/lists/partial"
        echo "deb $site $(. /etc/os-release; echo "$VERSION_CODENAME")-backports main" >"$WORK/sources"
        sources=(-o "Dir::Etc::SourceList=$WORK/sources" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$WORK/lists")
        apt-get "${sources[@]}" update >"$WORK/apt.log" 2>&1 || true
        kernel=$(newest "${sources[@]}")
    fi
    is_new "$kernel" || lacking "no kernel package of Linux 6.7 or newer is known: apt-get update, or KERNEL=FILE"
    say "downloading $kernel"
    (cd "$WORK" && apt-get "${sources[@]}" download "$kernel" >apt.log 2>&1) || { cat "$WORK/apt.log"; lacking "no kernel"; }
    dpkg-deb -x "$WORK"/*.deb "$WORK/kernel"
    rm "$WORK"/*.deb
fi
version=$(ls "$WORK/kernel/lib/modules")
busybox depmod -b "$WORK/kernel" "$version"

say "building the tests"
# All of them, as `./check.sh test` does, so that what it built is not built again with other features.
cargo test --workspace --no-run --locked --message-format=json >"$WORK/built" 2>"$WORK/build.log" || {
    cat "$WORK/build.log" >&2
    die "the tests cannot be built"
}
# Prints the program that cargo built of the target of a package.
built() {
    grep -F "/$1/Cargo.toml\"" "$WORK/built" | grep -F "\"name\":\"$2\"" |
        grep -oE '"executable":"[^"]+"' | cut -d'"' -f4
}
declare -A programs
for test in os:it zone:it zone:huge zone:kernel_pins fault:it hostpool:it; do
    programs[${test/:/-}]=$(built "${test%:*}" "${test#*:}") || die "no program of $test was built"
done
programs[uzone]=$(built cli uzone | grep '/debug/uzone$') || die "no program of cli:uzone was built"
programs[uzone-bench]=$(built bench uzone-bench | grep '/debug/uzone-bench$') || die "no program of bench:uzone-bench was built"

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
for name in "${!programs[@]}"; do
    take "${programs[$name]}" "$root/tests/$name"
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

# What each boot begins with. Its last argument of the kernel's command line is what it is for.
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
export REQUIRE_DAX=1 DAX_DIR=/mnt DAX_NODE=1
# The kernel does not number them in the order in which they are given.
for number in 1 2; do
    if [ "\$(cat /sys/bus/nd/devices/region\$number/size)" -gt \$((1 << 30)) ]; then
        huge=\$number
    else
        small=\$number
    fi
done
if [ "\$purpose" = check ]; then
    run mount -t ext4 -o dax=always /dev/pmem\$small /mnt
    DAX_LASTING=check run /tests/zone-it persist::what_is_written --nocapture
    echo "dax-vm: PASSED"
    poweroff -f
fi
run ndctl create-namespace --force --reconfig=namespace0.0 --mode=devdax --align=$ALIGN --map=mem
run ndctl create-namespace --force --reconfig=namespace\$small.0 --mode=fsdax --map=mem
run mkfs.ext4 -q -b 4096 /dev/pmem\$small
# The journal is written when a program asks for that, and not every five seconds: see what_is_written_durably.
run mount -t ext4 -o dax=always,commit=300 /dev/pmem\$small /mnt
ls -l /dev/dax*
run /tests/os-it dax:: --nocapture --test-threads=1
run /tests/os-it adopt:: --test-threads=1
run /tests/zone-it regions:: --nocapture --test-threads=1
run /tests/zone-huge holds_its_own_descriptors --nocapture --test-threads=1
# The second node has memory and no CPU.
run /tests/zone-huge node --nocapture --test-threads=1
run /tests/zone-kernel_pins the_kernel_moves --nocapture --test-threads=1
run /tests/hostpool-it pages:: --nocapture --test-threads=1
run /tests/zone-it persist:: --nocapture --test-threads=1
# Their files lie beside the program: on the DAX mount.
run cp /tests/fault-it /mnt
run /mnt/fault-it live:: --nocapture --test-threads=1
run rm /mnt/fault-it
run /tests/uzone doctor
# To measure which stores are fastest takes longer here than the benchmark.
export UZONE_STORE_POLICY=fill=avx2,zero=avx2,copy=avx2
described() { run /tests/uzone-bench bind --size 1G --rebinds 2 --table bind-dax --dax "\$1"; }
run dd if=/dev/zero of=/mnt/described bs=1M count=64
described /mnt/described
run rm /mnt/described
for align in 4K 2M; do
    run ndctl create-namespace --force --reconfig=namespace0.0 --mode=devdax --align=\$align --map=mem
    described /dev/dax0.0
done
run ndctl create-namespace --force --reconfig=namespace\$huge.0 --mode=devdax --align=1G --map=mem
described /dev/dax\$huge.0
DAX_LASTING=write run /tests/zone-it persist::what_is_written --nocapture
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) >"$WORK/initrd"

# Starts the machine for a purpose. Its memory that lasts is two files, on the second of its two nodes; a
# program starts on the first.
boot() {
    say "booting $version to $1, output follows"
    qemu-system-x86_64 \
        -machine "q35,nvdimm=on,accel=tcg" -cpu max -smp 2 -m 1G,slots=3,maxmem=6G \
        -object memory-backend-ram,id=near,size=640M -numa node,nodeid=0,cpus=0-1,memdev=near \
        -object memory-backend-ram,id=far,size=384M -numa node,nodeid=1,memdev=far \
        -object "memory-backend-file,id=memory0,mem-path=$WORK/nvdimm0,size=${NVDIMM_MIB}M,share=on" \
        -device nvdimm,id=nvdimm0,memdev=memory0,node=1 \
        -object "memory-backend-file,id=memory1,mem-path=$WORK/nvdimm1,size=${NVDIMM_MIB}M,share=on" \
        -device nvdimm,id=nvdimm1,memdev=memory1,node=1 \
        -object "memory-backend-file,id=memory2,mem-path=$WORK/nvdimm2,size=${HUGE_MIB}M,share=on" \
        -device nvdimm,id=nvdimm2,memdev=memory2,node=1 \
        -kernel "$WORK/kernel/boot/vmlinuz-$version" -initrd "$WORK/initrd" \
        -append "console=ttyS0 quiet panic=-1 purpose=$1" \
        -nographic -no-reboot -nic none </dev/null > >(sed -u 's/\r//g' | tee "$WORK/output") 2>&1 &
    machine=$!
}

# Waits for a line of the machine's output.
await() {
    local until=$((SECONDS + TIMEOUT_S))
    until grep -q "^dax-vm: $1" "$WORK/output"; do
        grep -q '^dax-vm: FAILED' "$WORK/output" && die "the tests failed in the machine, see above"
        kill -0 "$machine" 2>/dev/null || die "the machine ended before it printed 'dax-vm: $1'"
        [ "$SECONDS" -lt "$until" ] || die "the machine ran for more than $TIMEOUT_S s"
        sleep 0.05
    done
}

: >"$WORK/output"
boot test
await WRITTEN
# As a loss of power: the machine's kernel writes nothing any more.
kill -KILL "$machine"
wait "$machine" 2>/dev/null || true
: >"$WORK/output"
boot check
await PASSED
wait "$machine" || true
machine=
