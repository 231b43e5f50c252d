"""Each operator takes its right call, also in a capture, and refuses what CANN documents as wrong. Argument
names and types are refused by the wheel's own schemas."""

import pytest
import torch
import torch_npu

from tests.ascend import calls, calls_latents, calls_linears, calls_tiling
from tests.ascend.calls import Case
from tests.ascend.emulate.mx import MX
from tests.ascend.emulate.operators import OPERATORS
from tests.ascend.emulate.table import Limits, Refused

assert torch_npu  # brings the operators
pytestmark = pytest.mark.ascend

CASES = [
    *calls.ATTENTION,
    *calls.CACHE,
    *calls.NORMS,
    *calls.SAMPLING,
    *calls_linears.LINEARS,
    *calls_linears.EXPERTS,
    *calls_latents.LATENTS,
    *calls_tiling.TILING,
]
RIGHT = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.partition("::")[2])
WRONG = [(case, at) for case in CASES for at in range(len(case.wrong))]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@RIGHT
def test_right_calls_are_taken_at_full_strictness(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "strict", True)
    case.call({})


@RIGHT
def test_right_calls_can_be_captured(case: Case) -> None:
    args, named = case.right()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = Case(case.name, lambda: (args, named)).call({})
    graph.replay()
    found, expected = (
        list(x) if isinstance(x, (tuple, list)) else [x]
        for x in (out, Case(case.name, lambda: (args, named)).call({}))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is None or torch.equal(mine.cpu().nan_to_num(7), theirs.cpu().nan_to_num(7))


@pytest.mark.parametrize(
    ("case", "at"), WRONG, ids=[f"{case.name.partition('::')[2]}-{case.wrong[at][0]}" for case, at in WRONG]
)
def test_wrong_calls_are_refused(case: Case, at: int) -> None:
    reason, change = case.wrong[at]
    with pytest.raises(Refused, match=reason):
        case.call(change())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch_npu.npu_rms_norm(x, x[0], eps=1e-6),
        lambda x: torch_npu.npu_rms_norm(x, gamma=None),
        lambda x: torch.ops.npu.npu_quant_matmul(x, x, x, output_type=torch.bfloat16),
        lambda x: torch.ops.npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths="all"),
    ],
)
def test_the_wheel_refuses_names_and_types(wrong: object) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError), match="npu_|argument|conversion|keyword"):
        wrong(torch.ones(2, 8, device="npu"))  # type: ignore[operator]


def test_every_operator_is_one_of_the_wheel() -> None:
    for name in OPERATORS:
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        assert getattr(getattr(getattr(torch.ops, space), base), overload or "default"), name


def test_formats_with_shared_exponents_are_of_the_950() -> None:
    """All operators of the wheel that make them, but for those of training."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if "mx_quant" in name}
    ours = {name for name in names if name.startswith("npu::") and "backward" not in name}
    assert ours == set(MX)
    for make in (torch_npu.npu_dynamic_mx_quant, torch_npu.npu_dynamic_dual_level_mx_quant):
        with pytest.raises(Refused, match="Ascend 950"):
            make(torch.ones(4, 64, dtype=torch.bfloat16, device="npu"))
