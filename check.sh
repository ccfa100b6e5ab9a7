#!/usr/bin/env bash
# Runs the checks of the project, here as in CI. A tool that is missing is installed.
#
#   ./check.sh            the checks of every commit: format, Clippy, tests, examples, documentation, packages
#   ./check.sh long       the longer ones: stress for a minute, loom, Miri, AddressSanitizer, fuzzing, DAX in a virtual
#                         machine, other readers of images, the Python package, and the rules for dependencies
#   ./check.sh test doc   these stages alone
#
# REQUIRE_ALL=1 makes a skipped test case a failure.
# MIRI_TOOLCHAIN names the toolchain that has Miri and sanitizers (default: nightly).
set -euo pipefail
cd "$(dirname "$0")"

STAGES=(format clippy test examples doc package)
LONG_STAGES=(stress loom miri asan fuzz dax readers python deny)
MIRI_TOOLCHAIN=${MIRI_TOOLCHAIN:-nightly}
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT

# The stages look at what they built, so it has to be here and nowhere else.
export CARGO_TARGET_DIR=$PWD/target
export RUST_BACKTRACE=${RUST_BACKTRACE:-0}
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}

say() { printf '%s\n' "$*"; }
die() { say "check.sh: $*" >&2; exit 1; }

# Shows why a stage failed: what its failed tests printed, and the end of its log.
show_failure() {
    local log=$1
    awk '/^failures:$/ {on = 1} /^test result:/ {on = 0} on' "$log"
    tail -n 100 "$log"
}

# Runs a stage; shows of its log what matters, and only if it fails.
stage() {
    local name=$1 log="$LOGS/$1" started=$SECONDS
    printf '%-8s ' "$name"
    # A subshell outside of any condition, or the first failing command would not end the stage.
    local code
    set +e
    (
        set -e
        "stage_$name"
    ) >"$log" 2>&1
    code=$?
    set -e
    if [ "$code" -ne 0 ]; then
        say "FAILED after $((SECONDS - started)) s"
        show_failure "$log"
        mkdir -p target
        mv "$log" "target/check-$name.log"
        die "the stage '$name' failed (all it printed: target/check-$name.log); run it alone with: ./check.sh $name"
    fi
    local summary
    summary=$(cat "$LOGS/$name.summary" 2>/dev/null || true)
    say "ok    $((SECONDS - started)) s${summary:+   $summary}"
    # A test that cannot run here names itself and the reason.
    { grep -hE '^skipped: ' "$log" || true; } | sort -u | sed 's/^/         /'
}

# Runs the command line that follows the seconds, at most that long. A test that hangs fails the stage, and
# the runner has named it by then.
limited() {
    local seconds=$1 code=0
    shift
    timeout --kill-after=10 "$seconds" "$@" || code=$?
    [ "$code" -ne 124 ] || say "stopped after $seconds s: a test that 'has been running' above did not end"
    return "$code"
}

# Adds up what the test runner counted in the log of a stage; a stage that ran nothing fails.
count_tests() {
    local name=$1 ran skips
    local log=$LOGS/$name
    ran=$(grep -oE '^test result: ok\. [0-9]+ passed' "$log" | awk '{sum += $4} END {print sum + 0}')
    skips=$({ grep -hE '^skipped: ' "$log" || true; } | sort -u | wc -l)
    if [ "$ran" -eq 0 ]; then
        say "the stage '$name' ran no test"
        return 1
    fi
    say "$ran tests, $skips skipped" >"$LOGS/$name.summary"
    printf '%s %s\n' "$ran" "$skips" >>"$LOGS/counts"
}

need_component() {
    local tool=$1 component=$2
    cargo "$tool" --version >/dev/null 2>&1 && return
    rustup component add "$component" || {
        say "cannot install $component: run 'rustup component add $component'"
        return 1
    }
}

stage_format() {
    need_component fmt rustfmt
    cargo fmt --all -- --check
}

stage_clippy() {
    need_component clippy clippy
    # The profile of the tests, so that C is compiled once for both.
    cargo clippy --profile test --workspace --all-targets --locked -- -D warnings
    # The libraries compile for the other architecture that they have code for.
    local other=aarch64-unknown-linux-gnu
    if rustup target add "$other"; then
        cargo check --target "$other" -p uzone-pages -p uzone-stream -p uzone-os -p uzone-zone -p uzone-fault --locked
    else
        say "skipped: check for $other: run 'rustup target add $other'"
    fi
    RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
        cargo clippy -p uzone-pages -p uzone-os -p uzone-fault --test loom --locked -- -D warnings
}

# One test lets system calls fail by strace, and is skipped where there is none.
need_strace() {
    command -v strace >/dev/null && return
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 0
    { apt-get install -y strace || { apt-get update && apt-get install -y strace; }; } >/dev/null 2>&1 || true
}

stage_test() {
    need_strace
    cargo test --workspace --locked --no-run
    # --show-output, so that a skip of a passing test is seen.
    limited 1800 cargo test --workspace --no-fail-fast --locked -- --show-output
    count_tests test
}

# The tests that repeat themselves for UZONE_TEST_SECONDS, each for a minute.
stage_stress() {
    cargo test --workspace --locked --no-run
    UZONE_TEST_SECONDS=${UZONE_TEST_SECONDS:-60} limited 1800 \
        cargo test -p uzone-zone -p uzone-fault -p uzone-server --no-fail-fast --locked --test it -- --show-output stress:: many_threads_over hostile:: diff:: stopped_for_long
    count_tests stress
}

stage_doc() {
    rm -rf target/doc
    RUSTDOCFLAGS="-D warnings" \
        cargo doc --profile test --workspace --no-deps --locked --document-private-items
    local pages
    pages=$(find target/doc -name index.html | wc -l)
    [ "$pages" -gt 0 ] || { say "no documentation was written"; return 1; }
}

# Every package can be packed for publication: its files, its metadata, and the versions that it names.
stage_package() {
    cargo package --workspace --locked --allow-dirty --no-verify
    say "$(grep -c ' Packaged ' "$LOGS/package") packages" >"$LOGS/package.summary"
}

stage_loom() {
    # The bound on preemptions keeps the search finite: more than three in one race are not tried.
    LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
        cargo test -p uzone-pages -p uzone-os -p uzone-fault --test loom --release --locked
    count_tests loom
}

need_nightly() {
    cargo "+$MIRI_TOOLCHAIN" miri --version >/dev/null 2>&1 && return
    rustup toolchain install "$MIRI_TOOLCHAIN" --profile minimal \
        --component miri --component rust-src || {
        say "cannot install Miri: run 'rustup toolchain install $MIRI_TOOLCHAIN --component miri,rust-src'"
        return 1
    }
}

stage_miri() {
    need_nightly
    # The compiler of the toolchain may know lints that ours does not.
    miri() {
        RUSTFLAGS="--cap-lints=warn" \
            cargo "+$MIRI_TOOLCHAIN" miri test "$@"
    }
    miri -p uzone-pages -p uzone-stream --locked -- --show-output
    # The rest of the package calls the kernel. `fault` has no unsafe code.
    miri -p uzone-os --lib --locked -- --show-output live::
    count_tests miri
}

# A sanitizer selects the slow paths by itself (os/build.rs). Some tests leak on purpose, and SIGBUS is ours;
# the other tests of zone and os count mappings and limit the address space, of which a sanitizer takes much.
stage_asan() {
    need_nightly
    local target
    target=$(rustc -vV | sed -n 's/^host: //p')
    asan() {
        UZONE_SANITIZED=1 ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0 CARGO_TARGET_DIR=target/asan \
            RUSTFLAGS="-Zsanitizer=address --cap-lints=warn" \
            limited 900 cargo "+$MIRI_TOOLCHAIN" test --target "$target" --locked "$@" -- --show-output
    }
    asan -p uzone-os -p uzone-stream -p uzone-zone -p uzone-fault --lib
    asan -p uzone-stream --test sanitizer
    asan -p uzone-zone --test huge --test pool
    asan -p uzone-zone --test it hold::
    count_tests asan
}

# Every example ends well, which is what they check of themselves.
stage_examples() {
    # Built as the tests are, which need the same: in release, their dependencies take minutes.
    cargo build --profile test --workspace --examples --locked
    local file name ran=0
    for file in */examples/*.rs; do
        name=$(basename "$file" .rs)
        # Examples that take longer by default get a small size.
        local arguments=()
        case $name in
            gpu)
                # A driver of the tests, which checks its calls.
                cc -shared -fPIC -o "$LOGS/stub_driver.so" hostpool/tests/stub_driver.c -lpthread
                arguments=(short)
                ;;
            stream_limits) arguments=(32 1) ;;
            stream_ways) arguments=(zero 1) ;;
            trace) arguments=("$LOGS/trace.json") ;;
            vmm) arguments=(64M) ;;
        esac
        say "== $file"
        UZONE_CUDA_LIBRARY="$LOGS/stub_driver.so" "target/debug/examples/$name" "${arguments[@]}"
        ran=$((ran + 1))
    done
    cargo run --profile test -p uzone-cli --locked -- report "$LOGS/trace.json" -o "$LOGS/trace.html"
    say "$ran examples" >"$LOGS/examples.summary"
}

# Tests of DAX memory in a virtual machine, whose loss of power is a signal.
stage_dax() {
    local code=0
    limited 1200 scripts/dax-vm.sh || code=$?
    if [ "$code" -eq 75 ]; then
        say "skipped: dax: this host lacks what emulates NVDIMMs; scripts/dax-vm.sh names it"
        echo "skipped" >"$LOGS/dax.summary"
        return 0
    fi
    [ "$code" -eq 0 ] || return "$code"
    count_tests dax
}

# Images read by other readers of the seekable format: of the Python Package Index, and a Go module.
stage_readers() {
    local place=target/readers go=()
    cargo build -p uzone-cli --profile test --locked
    [ -x "$place/bin/python" ] || python3 -m venv "$place" || {
        say "skipped: readers: python3 with the module venv is missing"
        return 0
    }
    "$place/bin/pip" install --quiet --disable-pip-version-check 'pyzstd>=0.20,<0.21' 'indexed_zstd>=1.7,<1.8'
    if command -v go >/dev/null; then
        (cd scripts/readers && go build -buildvcs=false -o "../../$place/go-reader" .)
        go=("$place/go-reader")
    else
        say "skipped: readers: the Go module; there is no Go"
    fi
    limited 300 "$place/bin/python" scripts/readers/readers.py target/debug/uzone "${go[@]}"
    count_tests readers
}

# The parsers of bytes from outside, each for some seconds. Inputs that were found before are in fuzz/corpus, which
# stays as it is; an input that fails is left in fuzz/artifacts.
stage_fuzz() {
    need_nightly
    cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --debug --locked --version ^0.13 || {
        say "cannot install cargo-fuzz: run 'cargo install cargo-fuzz --locked'"
        return 1
    }
    local target name ran=0
    # Its own target folder: fuzz is no member of the workspace.
    unset CARGO_TARGET_DIR
    for target in fuzz/targets/*.rs; do
        name=$(basename "$target" .rs)
        mkdir -p "$LOGS/corpus-$name"
        limited 600 cargo "+$MIRI_TOOLCHAIN" fuzz run --fuzz-dir fuzz "$name" "$LOGS/corpus-$name" "fuzz/corpus/$name" -- \
            -max_total_time="${FUZZ_SECONDS:-10}" -max_len=4096 -malloc_limit_mb=64
        ran=$((ran + 1))
    done
    say "$ran parsers" >"$LOGS/fuzz.summary"
}

# The Python package, its examples and its guide. What maturin builds by `cargo rustc` would be compiled for another
# profile, so the package is put together from the library of this one; the wheel has the same files.
stage_python() {
    local place=$PWD/target/python package=$PWD/target/python-package
    [ -x "$place/bin/python" ] || python3 -m venv "$place" || {
        say "skipped: python: python3 with the module venv is missing"
        return 0
    }
    if ! "$place/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "skipped: python: it needs Python 3.11"
        return 0
    fi
    "$place/bin/pip" install --quiet --disable-pip-version-check 'numpy>=2.3,<3' 'pytest>=9,<10' 'mypy>=2.4,<3'
    cargo build --profile test -p uzone-python --locked
    rm -rf "$package"
    mkdir -p "$package"
    cp -r python/uzone "$package"
    cp target/debug/lib_uzone.so "$package/uzone/_uzone.abi3.so"
    PYTHONPATH=$package limited 600 "$place/bin/python" -m pytest -q -p no:cacheprovider python/tests
    count_tests python
}

stage_deny() {
    if ! cargo deny --version >/dev/null 2>&1; then
        # To optimise it takes minutes, and it runs for seconds.
        cargo install cargo-deny --debug --locked --version ^0.20 || {
            say "cannot install cargo-deny: run 'cargo install cargo-deny --locked'"
            return 1
        }
    fi
    cargo deny --locked check bans licenses sources
    # The list of known defects is fetched from the network, which a check must not depend on.
    if timeout 60 cargo deny --locked check advisories; then
        say "bans, licenses, sources, advisories" >"$LOGS/deny.summary"
    elif timeout 60 cargo deny fetch db >/dev/null 2>&1; then
        return 1
    else
        say "skipped: advisories: the advisory database cannot be reached from here"
        say "bans, licenses, sources" >"$LOGS/deny.summary"
    fi
}

command -v cargo >/dev/null || die "cargo is missing: install Rust from https://rustup.rs"
[ $# -gt 0 ] || set -- "${STAGES[@]}"
[ "$*" != long ] || set -- "${LONG_STAGES[@]}"
for name in "$@"; do
    declare -F "stage_$name" >/dev/null || die "no stage '$name'; there are: ${STAGES[*]} ${LONG_STAGES[*]}, and long"
done
for name in "$@"; do
    stage "$name"
done
if [ -f "$LOGS/counts" ]; then
    awk '{ran += $1; skips += $2} END {printf "%d passed, 0 failed, %d skipped\n", ran, skips}' \
        "$LOGS/counts"
fi
