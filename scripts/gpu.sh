#!/bin/sh
# Measures the pool of host memory on a machine with CUDA, and prints one JSON object: {"pool": ..., "python": ...}.
# It takes four minutes or so, 8 at most, and 70 GiB of free memory. The machine needs the driver alone: no toolkit, no
# compiler. A part that cannot run is {"failed": "the reason"}, and the exit code is 1 then.
#
#   scripts/gpu.sh [PROGRAM] [WHEEL]
#
# PROGRAM   `cargo build --release -p uzone-hostpool --example gpu`, by default target/release/examples/gpu
# WHEEL     the Python package (docs/PYTHON.md), by default none; it wants python3 with pip, torch and NumPy
set -eu
cd "$(dirname "$0")/.."
program=${1:-target/release/examples/gpu}
wheel=${2:-}
if [ ! -x "$program" ]; then
    echo "gpu.sh: no program at $program: cargo build --release -p uzone-hostpool --example gpu" >&2
    exit 66
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# Runs the command line that follows a limit in seconds, and prints its JSON, or the reason that it gives at its end.
part() {
    seconds=$1
    shift
    code=0
    timeout "$seconds" "$@" >"$folder/out" 2>"$folder/error" || code=$?
    cat "$folder/error" >&2
    if [ "$code" -eq 0 ]; then
        cat "$folder/out"
        return
    fi
    failed=1
    cat "$folder/out" >&2
    reason=$(tail -n 1 "$folder/error" | tr -d '"\\')
    [ "$code" -ne 124 ] || reason="stopped after $seconds s"
    echo "gpu.sh: ${reason:-exit code $code}" >&2
    printf '{"failed": "%s"}' "${reason:-exit code $code}"
}

printf '{"pool": '
part 400 "$program"
printf ', "python": '
if [ -z "$wheel" ]; then
    echo "gpu.sh: no wheel was given: the Python package is not measured" >&2
    printf 'null'
elif python3 -m pip install -q --no-index --no-deps --target "$folder/package" "$wheel" >&2; then
    part 60 env PYTHONPATH="$folder/package" python3 python/tests/gpu.py
else
    failed=1
    printf '{"failed": "the wheel cannot be installed"}'
fi
echo '}'
exit "$failed"
