#!/bin/sh
# Run a small problem of every GPU backend under compute-sanitizer; any report makes this fail.
#
#     sh scripts/sanitize.sh [TOOL ...]        tools: memcheck racecheck (both if none is named), initcheck, synccheck
#
# PYTHON chooses the interpreter, COMPUTE_SANITIZER the program. Exit status: 0 clean, 1 a report, 2 no compute-sanitizer.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
found=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)}
if [ -z "$found" ]; then
    echo "sanitize: no compute-sanitizer on the PATH or under /usr/local/cuda*; it comes with the CUDA toolkit" >&2
    exit 2
fi
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
# The first run fills the disk cache, so that nothing is compiled under the tool.
"$PYTHON" tests/gpu/sanitized.py || exit 1
# Every tensor gets an allocation of its own, so that a step past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in ${*:-memcheck racecheck}; do
    echo "sanitize: $tool"
    "$found" --tool "$tool" --error-exitcode 1 --target-processes application-only --launch-timeout 0 \
        "$PYTHON" tests/gpu/sanitized.py || status=1
done
exit $status
