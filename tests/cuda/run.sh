#!/bin/bash
# Everything that a GPU can check and measure, in less than ten minutes: kernels, the conformance suite, ranks and servers on the GPU,
# then bench/gpu.py, bench/gpu_gemm.py and bench/gpu_idle.py, whose results are in bench/results/. From the root of the repository:
#     bash tests/cuda/run.sh [tests] [bench] [gemm] [idle]        # without an argument: all of it
#     bash tests/cuda/run.sh compiled                             # decode steps with torch.compile, which takes minutes more
# What is missing is installed from .wheels/ (tests/cuda/wheels.sh) where that folder is, to a folder of its own.
set -u
cd "$(dirname "$0")/../.." || exit
PYTHON=${PYTHON:-python3}
if [ -d .wheels ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .wheels/*.whl || exit
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU")' || exit
parts=${*:-tests bench gemm idle}
failed=""
run() {  # name, seconds at most, command
    echo "== $1"
    begin=$SECONDS
    timeout "$2" "${@:3}" || failed="$failed $1"
    echo "== $1: $((SECONDS - begin)) s"
}
pytest() {  # warnings of other installed packages do not count
    "$PYTHON" -m pytest -q -p no:cacheprovider -p no:benchmark -W default "$@"
}
export -f pytest
export PYTHON
spread=$("$PYTHON" -c 'from importlib.util import find_spec as f; print("-n 12" if f("xdist") else "")')
for part in $parts; do
    case $part in
    tests)
        run ranks 120 bash -c 'pytest tests/cuda -m cuda --durations=5'
        run kernels 200 bash -c "pytest tests/devices/cuda tests/devices/test_conformance.py tests/devices/test_attention_conformance.py tests/devices/test_schemes.py -m 'not ascend' \
            -k 'not cpu and not npu and not interpreter' $spread" ;;
    bench) run bench 300 "$PYTHON" -m bench.gpu ;;
    gemm) run gemm 200 "$PYTHON" -m bench.gpu_gemm ;;
    idle) run idle 80 "$PYTHON" -m bench.gpu_idle ;;
    compiled) run compiled 600 "$PYTHON" -m bench.gpu_compiled ;;
    *) echo "there is no part $part; choose tests, bench, gemm, idle, compiled"; exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
