#!/bin/sh
# Everything that a card can check and measure, in less than ten minutes: the kernels and the conformance suite on the card, then
# bench/gpu.py. From the root of the repository:  bash tests/cuda/run.sh [PYTEST ARGUMENT ...]
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no card")'
"$PYTHON" -m pytest tests/devices/cuda tests/devices/test_conformance.py -q -p no:cacheprovider -m "not ascend" \
    -k "not cpu and not npu and not interpreter" "$@"
"$PYTHON" -m bench.gpu
