"""Every flag that the reference marks as supported on Atlas A2 or A3: it works with `--device npu`, or there
is a reason why not. tests/options/test_ascend.py tries those that act."""

import pytest

from runtime.options.table import Row, rows
from tests.options.test_ascend import NPU, SUPPORTED, cases, problems

ROWS: dict[str, Row] = {name: row for row in rows() for name in (row.flag, *row.aliases)}

# what is refused because of the device, and would be taken on another one
TILES = "weights are in FRACTAL_NZ on an NPU, which host memory cannot keep"
REFUSED = {
    "--piecewise-cuda-graph-compiler": "torch.compile knows no NPU here",
    "--cpu-offload-gb": TILES,
    "--offload-group-size": TILES,
    "--enable-weights-cpu-backup": TILES,
    "--enable-draft-weights-cpu-backup": TILES,
    "--lora-backend": "triton: adapters are plain products here, there are no Triton kernels for NPUs",
    "--moe-runner-backend": "experts are CANN's grouped products, there are no Triton kernels for NPUs",
    "--enable-torch-compile": "steps are captured as they are; torchair and npugraph_ex are not used",
    "--enable-cudagraph-gc": "garbage is never collected during a capture, in which it could free a graph",
}
# options of other devices only
OTHERS = {"--disable-chunked-prefix-cache": "prefixes are expanded in parts of the heads, not of the tokens"}
# choices of the reference that are refused
CHOICES = {("--moe-a2a-backend", "ascend_fuseep"): "dispatch and combine are two operators here"}


@pytest.mark.parametrize("flag", SUPPORTED)
def test_each_flag_works_or_has_a_reason(flag: str) -> None:
    row = ROWS[flag]
    if row.status in ("superseded", "refused"):
        assert row.note
    elif not row.acts:
        assert flag in OTHERS, f"{flag} is for other devices, for no reason here"
    else:
        missing = {choice for choice in SUPPORTED[flag][1] if choice in row.later}
        assert missing == {choice for name, choice in CHOICES if name == flag}


@pytest.mark.parametrize(("flag", "value"), cases())
def test_what_acts_is_refused_on_npus_for_a_reason_only(flag: str, value: str | None) -> None:
    refused = any("DEVICE" in problem for problem in problems(flag, value, NPU))
    assert not refused or flag in REFUSED


def test_every_reason_is_used() -> None:
    refused = {flag for flag, value in cases() if problems(flag, value, NPU)}
    assert set(REFUSED) <= refused and all(not ROWS[flag].acts for flag in OTHERS)
    assert all(choice in ROWS[flag].later for flag, choice in CHOICES)
