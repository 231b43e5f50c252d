#!/bin/bash
# What a GPU can check and measure, in parts of at most nine minutes (bench/gpu_run.py says what is in A to E), from the root of the
# repository:
#     bash tests/cuda/run.sh A
#     bash tests/cuda/run.sh B      # the first call of a session that has minutes alone: figures that no card has shown yet
# Figures are lines of gpu.jsonl in the folder $OUT, else in bench/results. What is missing is installed from .wheels/
# (tests/cuda/wheels.sh) where that folder is, to a folder of its own.
set -u
cd "$(dirname "$0")/../.." || exit
PYTHON=${PYTHON:-python3}
if [ -d .wheels ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .wheels/*.whl || exit
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU")' || exit
exec "$PYTHON" -m bench.gpu_run "${@:-A}"
