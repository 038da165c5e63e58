#!/usr/bin/env bash
# Check and measure on a machine with an NVIDIA GPU, in at most ten minutes:
#
#   perf/gpu_check.sh [results folder, perf/results without it]
#
# Needs python3 (or PYTHON) with torch, triton, transformers, pytest and pytest-xdist; installs
# nothing. Every step has its own limit and its own files, so that one that fails or takes too long
# leaves the others' results. Where there is no GPU, this tries the scripts:
#
#   perf/gpu_check.sh --smoke [results folder, a temporary one without it]
set -uo pipefail
cd "$(dirname "$0")/.."
smoke=()
if [ "${1:-}" = --smoke ]; then
    smoke=(--smoke)
    results=${2:-$(mktemp -d)}
    export TRITON_INTERPRET=1
else
    results=${1:-perf/results}
fi
mkdir -p "$results"
python=${PYTHON:-python3}
export PYTHONPATH="model_repository/llm/1:client:kernels:.${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
failed=0

step() { # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$results/gpu-$name.log"; then
        echo "== $name: ok, $((SECONDS - begin)) s"
    else
        echo "== $name: FAILED, $((SECONDS - begin)) s"
        failed=1
    fi
}

if [ ${#smoke[@]} -eq 0 ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
    # Compilation takes most of the tests' time: spread it over the cores.
    step tests 150 "$python" -m pytest -q -p no:cacheprovider -n 12 \
        tests/kernels/test_triton_{attention,layer,sampling}.py tests/engine/test_triton_backend.py
fi
step kernels 220 "$python" -m perf.gpu.check "${smoke[@]}" --out "$results/gpu-kernels"
step end-to-end 200 "$python" -m perf.gpu.end_to_end "${smoke[@]}" --out "$results/gpu-end-to-end"
exit $failed
