#!/bin/sh
# Wheels of what this project needs and a machine with a card may lack, for x86-64 and Python 3.12, to .wheels/, which tests/cuda/run.sh
# installs from where there is no network. To be run where there is one:  bash tests/cuda/wheels.sh
set -eu
cd "$(dirname "$0")/../.."
platforms="--platform manylinux1_x86_64 --platform manylinux2014_x86_64"
for version in 5 17 24 27 28 31 34 35 39; do
    platforms="$platforms --platform manylinux_2_${version}_x86_64"
done
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
    --abi none $platforms -d .wheels "anyio>=4.9" "h2" "hpack" "httptools>=0.6.4" "hypercorn>=0.18,<0.19" "hyperframe" "jinja2>=3.1" "llguidance>=1.7" \
    "httpcore2" "httpx2" "huggingface_hub>=2.4" "msgspec>=0.19" "priority" "prompt_toolkit" "python-multipart>=0.0.20" "starlette>=0.46" "structlog>=25.1" "transformers>=5.24" "truststore" "wcwidth" "wsproto" "h11"
du -sh .wheels
