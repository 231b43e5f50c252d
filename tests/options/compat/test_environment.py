"""Environment settings of the tuning guide for Ascend in front of an SGLang command: each is carried over,
and a note says what became of it."""

import pytest

from runtime.options.compat.environment import ENVIRONMENT
from runtime.options.compat.translate import translate

COMMAND = "python -m sglang.launch_server --model-path /m --port 1"
VARIABLES = [setting.name for setting in ENVIRONMENT if setting.kind != "machine"]


@pytest.mark.parametrize("value", ["1", "0"])
@pytest.mark.parametrize("name", [*VARIABLES, "SGLANG_NPU_SOMETHING_NEW"])
def test_a_note_says_what_became_of_each(name: str, value: str) -> None:
    translation = translate([f"{name}={value}", *COMMAND.split()])
    (note,) = (note for note in translation.notes if name in note)
    flags = [flag for flag, _ in translation.settings if flag not in ("--model-path", "--port")]
    if flags:
        assert note == f"{name} is {flags[0]} here" and len(flags) == 1
    elif name in translation.environment:
        assert note == f"{name} is read from the environment here too"
    else:
        assert "is left out" in note


@pytest.mark.parametrize(
    ("variables", "expected", "notes"),
    [
        (
            "SGLANG_NPU_USE_MLAPO=1 SGLANG_USE_FIA_NZ=true HCCL_BUFFSIZE=650 TASK_QUEUE_ENABLE=1",
            "--npu-mla-prolog --npu-nz-cache --hccl-buffer-mb 650 --npu-task-queue 1",
            ["SGLANG_NPU_USE_MLAPO is --npu-mla-prolog here", "HCCL_BUFFSIZE is --hccl-buffer-mb here"],
        ),
        (
            "SGLANG_NPU_USE_MULTI_STREAM=0 SGLANG_USE_AG_AFTER_QLORA=1",
            "--npu-gather-after-q",
            ["SGLANG_NPU_USE_MULTI_STREAM=0 is left out: --npu-multi-stream is off where it is not given"],
        ),
        (
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=64 SGLANG_FOO=1",
            "",
            [
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK is left out; its counterpart here: derived "
                "from --npu-exchange-buffer-mb, the model and the generation of the NPU",
                "SGLANG_FOO is left out: the runtime takes no settings from the environment",
            ],
        ),
    ],
)
def test_lines(variables: str, expected: str, notes: list[str]) -> None:
    translation = translate([*variables.split(), *COMMAND.split()])
    assert " ".join(translation.words()) == " ".join(
        f"runtime serve {expected} --model-path /m --port 1".split()
    )
    assert set(notes) <= set(translation.notes)
