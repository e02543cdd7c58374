#!/usr/bin/env bash
# The CPU ops on AArch64 without such a machine: compiles the crate for it and runs the tests of
# the ops in an emulator, which computes as the processor does but says nothing about time.
#
#   scripts/aarch64_check.sh                       all of it
#   scripts/aarch64_check.sh CPU [CARGO TEST ...]  some tests on one CPU of the emulator,
#                                                  e.g. max --lib ops::cpu
#
# The first run unpacks Debian's newest cargo, rustc, cross compiler and qemu (350 MB of packages,
# 1.6 GB) into a folder of the user's cache; nothing of the machine is changed and root is not
# needed. It asks for apt and dpkg with Debian's keys, user namespaces, and a mirror: the one that
# the machine itself uses, or $DEBIAN_MIRROR. Where these cannot be had it ends with 75, and
# has checked nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

root="${CANDLE_PAGED_ATTN_AARCH64:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-paged-attn/aarch64}"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# Build scripts run here, so a compiler for this machine is needed as well.
packages=(rustc cargo gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

leave_out() {
    echo "AArch64 is not checked: $*" >&2
    exit 75
}

# The first mirror in the machine's list of sources, of either format.
own_mirror() {
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
        sed -nE 's!^(URIs:|deb( \[[^]]*\])?) *(https?://[^ ]*/debian)/?( .*)?$!\3!p' | sed -n 1p
}

# apt with folders of its own, below the current one.
private_apt() {
    mkdir -p lists/partial cache/archives/partial etc/apt.conf.d etc/preferences.d etc/sources.list.d
    : >status
    echo "deb [signed-by=$keys] $1 sid main" >etc/sources.list
    # A mirror may be a frozen one; signatures are checked all the same.
    cat >apt.conf <<CONF
Dir "$PWD";
Dir::State "$PWD";
Dir::State::status "$PWD/status";
Dir::State::lists "$PWD/lists";
Dir::Cache "$PWD/cache";
Dir::Etc "$PWD/etc";
Dir::Log "$PWD";
APT::Architecture "amd64";
APT::Architectures { "amd64"; "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
CONF
    export APT_CONFIG="$PWD/apt.conf"
}

# Into the current folder: root/ and the file `versions`.
install_root() {
    local mirror=$1 version package folder
    private_apt "$mirror"
    apt-get -q update || return
    version=$(apt-cache show --no-all-versions rustc | sed -n 's/^Version: //p')
    [ -n "$version" ] || return
    apt-get -q -y --download-only install "${packages[@]}" || return
    # The target's library alone, of the very compiler.
    (cd cache/archives && apt-get -q download "libstd-rust-dev:arm64=$version") || return
    mkdir -p root/usr/{bin,sbin,lib,lib64} root/tmp
    for folder in bin sbin lib lib64; do
        ln -s "usr/$folder" "root/$folder"
    done
    for package in cache/archives/*.deb; do
        dpkg-deb --extract "$package" root || return
        basename "$package" .deb >>versions
    done
    ln -sf gcc root/usr/bin/cc
}

if [ ! -e "$root/versions" ]; then
    [ "$(uname -m)" = x86_64 ] || leave_out "the packages are those of an x86-64 machine"
    command -v apt-get dpkg-deb >/dev/null || leave_out "there is no apt here"
    [ -e "$keys" ] || leave_out "Debian's keys are not installed"
    mirror="${DEBIAN_MIRROR:-$(own_mirror)}"
    [ -n "$mirror" ] || leave_out "no mirror of Debian is known; DEBIAN_MIRROR may name one"
    echo "installing Debian's tool chain for AArch64 into $root (1.6 GB)" >&2
    mkdir -p "$(dirname "$root")"
    fresh=$(mktemp -d "$root.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    (cd "$fresh" && install_root "$mirror") >"$fresh/log" 2>&1 || {
        tail -5 "$fresh/log" >&2
        leave_out "the tool chain could not be fetched"
    }
    rm -rf "$root"
    mkdir "$root"
    mv "$fresh/root" "$fresh/versions" "$root"
    rm -rf "$fresh"
    trap - EXIT
fi
unshare --map-root-user --mount true || leave_out "user namespaces are not to be had"

# Debian's compiler is another version than the one at hand: a target folder of its own.
target="${CARGO_TARGET_DIR:-$PWD/target}/aarch64"
home="${CARGO_HOME:-$HOME/.cargo}"
mkdir -p "$target"
cargo fetch --locked --quiet

# Runs cargo in the root, in which this tree, the registry and the target folder lie where they
# lie outside; with variables before its arguments.
cargo_inside() {
    local variables=()
    while [[ "$1" == *=* ]]; do
        variables+=("$1")
        shift
    done
    env --ignore-environment PATH=/usr/bin:/usr/sbin HOME="$HOME" TMPDIR=/tmp \
        CARGO_HOME="$home" CARGO_TARGET_DIR="$target" CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64 \
        QEMU_LD_PREFIX=/usr/aarch64-linux-gnu "${variables[@]}" \
        unshare --map-root-user --mount bash -euc '
            root=$1
            shift
            while [ "$1" != -- ]; do
                mkdir -p "$root$1"
                mount --rbind "$1" "$root$1"
                shift
            done
            shift
            exec chroot "$root" cargo "$@"' inside \
        "$root/root" /proc /dev /tmp "$PWD" "$home" "$target" -- "$@"
}

# On a CPU of the emulator: `max` has all there is, `cortex-a53` what every AArch64 has.
tests_on() {
    local cpu=$1
    shift
    echo "-- tests on the CPU $cpu: $*"
    cargo_inside QEMU_CPU="$cpu" test --locked --offline --manifest-path "$PWD/Cargo.toml" \
        --target aarch64-unknown-linux-gnu "$@"
}

if [ $# -gt 0 ]; then
    tests_on "$@"
    exit
fi

tests_on max --lib ops::
tests_on max --test attention --test cascade --test linear --test ops
tests_on cortex-a53 --lib ops::cpu
# candle's own products of block formats use an instruction that this CPU lacks.
tests_on cortex-a53 --test linear -- --skip product_of_candle
