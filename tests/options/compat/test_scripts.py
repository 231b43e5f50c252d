"""Scripts as they are published for Ascend: settings of the machine, exports with and without semicolons, a
command over several lines. One command of ours comes out, and a word on each line that has no part in it."""

import io
import sys

import pytest

from runtime.cli.translate import run
from runtime.options.compat.translate import translate

SCRIPT = r"""#!/bin/bash
# a decode server
echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor
sysctl -w vm.swappiness=0
source /usr/local/Ascend/ascend-toolkit/set_env.sh
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True; export STREAMS_PER_DEVICE=32;
export HCCL_BUFFSIZE=1600 TASK_QUEUE_ENABLE="1"
export SGLANG_NPU_USE_MLAPO=1; export SGLANG_USE_FIA_NZ=1
export SGLANG_ENABLE_SPEC_V2=1
MODEL_PATH=/models/r1
if [[ "$1" == "decode" ]]; then
    export SGLANG_NPU_USE_MULTI_STREAM=1
    python3 -m sglang.launch_server --model-path ${MODEL_PATH} \
        --device npu --attention-backend ascend \
        --tp 16 --dp-size 16 --enable-dp-attention --enable-dp-lm-head \
        --max-running-requests 256 --chunked-prefill-size 32768 \
        --moe-a2a-backend deepep --deepep-mode auto \
        --host 127.0.0.1 --port 6699;
fi
wait
"""
LINE = (
    "runtime serve --npu-alloc-conf expandable_segments:True --npu-streams 32 --hccl-buffer-mb 1600 "
    "--npu-task-queue 1 --npu-mla-prolog --npu-nz-cache --npu-multi-stream --model-path /models/r1 "
    "--device npu --attention-backend ascend --tensor-parallel-size 16 --data-parallel-size 16 "
    "--enable-dp-attention --enable-dp-lm-head --max-running-requests 16 --chunked-prefill-size 2048 "
    "--moe-a2a-backend deepep --deepep-mode auto --host 127.0.0.1 --port 6699"
)


def test_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SCRIPT))
    assert run([]) == 0
    out, notes = capsys.readouterr()
    assert out.strip() == LINE
    for note in (
        "--max-running-requests is that of one attention group: 256 divided by 16",
        "--chunked-prefill-size is that of one attention group: 32768 divided by 16",
        "SGLANG_NPU_USE_MLAPO is --npu-mla-prolog here",
        "SGLANG_ENABLE_SPEC_V2 is left out; its counterpart here: always so",
        "vm.swappiness is left out; its counterpart here: runtime check doctor",
    ):
        assert note in notes


SGLANG = "python3 -m sglang.launch_server --model-path /m --port 1 "


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-running-requests 64 --dp 4 --tp 4 --enable-dp-attention", "16"),
        ("--max-running-requests 2 --dp 4 --tp 4 --enable-dp-attention", "1"),
        ("--max-running-requests 64 --dp 4", "64"),
        ("--max-running-requests 64 --tp 4 --enable-dp-attention", "64"),
    ],
)
def test_limits_of_all_attention_groups(words: str, expected: str) -> None:
    """SGLang divides by the number of groups, and only where attention has groups."""
    assert dict(translate((SGLANG + words).split()).settings)["--max-running-requests"] == expected


def test_chunks_that_are_not_split() -> None:
    words = SGLANG + "--chunked-prefill-size -1 --dp 4 --tp 4 --enable-dp-attention"
    assert dict(translate(words.split()).settings)["--chunked-prefill-size"] == "-1"


@pytest.mark.parametrize(
    "words",
    [
        "export HCCL_BUFFSIZE=400; " + SGLANG,
        "HCCL_BUFFSIZE=400 " + SGLANG + "; echo done",
        "env HCCL_BUFFSIZE=400 " + SGLANG,
    ],
)
def test_ends_of_commands(words: str) -> None:
    made = translate(words.split())
    assert made.line() == "runtime serve --hccl-buffer-mb 400 --model-path /m --port 1"
