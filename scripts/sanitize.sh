#!/bin/sh
# Run a small problem of every GPU backend under compute-sanitizer; any report makes this fail.
#
#     sh scripts/sanitize.sh [TOOL ...]        memcheck and racecheck if none is named; initcheck and synccheck too
#
# PYTHON chooses the interpreter, BACKENDS the backends, COMPUTE_SANITIZER the program.
# Exit status: 0 clean, 1 a report or a failed run, 2 no compute-sanitizer.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
BACKENDS=${BACKENDS:-triton hopper}
found=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)}
if [ -z "$found" ]; then
    echo "sanitize: no compute-sanitizer on the PATH or under /usr/local/cuda*; it comes with the CUDA toolkit" >&2
    exit 2
fi
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
logs=$(mktemp -d) || exit 2
trap 'rm -rf "$logs"' EXIT

# Start "$@" in the background, writing to the log named first; finish waits for all and prints what they wrote.
running=""
begin() {
    log=$logs/$1
    shift
    "$@" >"$log" 2>&1 &
    running="$running $!:$log"
}
finish() {
    status=0
    for entry in $running; do
        wait "${entry%%:*}" || { status=1; echo "sanitize: $(basename "${entry#*:}") failed"; }
        cat "${entry#*:}"
    done
    running=""
    return $status
}

# The first run fills the disk cache, so that nothing is compiled under the tool.
for backend in $BACKENDS; do
    begin "plain-$backend" "$PYTHON" tests/gpu/sanitized.py "$backend"
done
finish || exit 1
# Every tensor gets an allocation of its own, so that a step past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in ${*:-memcheck racecheck}; do
    for backend in $BACKENDS; do
        begin "$tool-$backend" "$found" --tool "$tool" --error-exitcode 1 --print-limit 100 \
            "$PYTHON" tests/gpu/sanitized.py "$backend"
    done
done
finish
