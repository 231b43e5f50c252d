"""Quantised checkpoints on an NPU against the cpu device, which is exact."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.base import Quantized
from runtime.errors import ModelError
from runtime.models.config.quantization_schemes import PackedInt
from tests.devices.conformance import Bench
from tests.devices.test_schemes import expected, random_weight
from tests.models import quantise as quantiser
from tests.models import quantisers
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.test_quantised import log_probabilities

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
    },
}


def compare(folder: Path, *, is_exact: bool) -> None:
    """An input on the edge of two codes may be rounded either way."""
    (cpu, tokens), (npu, others) = (
        log_probabilities(folder, device=device, page_size=128, dtype="float32") for device in ("cpu", "npu")
    )
    torch.testing.assert_close(npu, cpu, atol=1e-4 if is_exact else 5e-2, rtol=0)
    assert (npu - cpu).abs().mean() < (2e-5 if is_exact else 5e-3) and tokens == others


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "ct int8"),
        ("qwen2", "ct int8 static"),
        ("qwen2", "modelslim W8A8"),
        ("qwen2", "modelslim W8A8_DYNAMIC"),
        ("qwen2", "modelslim W4A8_DYNAMIC"),
        ("qwen3_moe", "modelslim W8A8"),
        ("qwen3_moe", "modelslim W4A8_DYNAMIC"),
        ("qwen3_moe", "ct int8"),
        ("deepseek_v3", "modelslim W8A8_DYNAMIC"),
        ("deepseek_v3", "modelslim W8A8"),
    ],
)
def test_tokens_are_as_likely_as_on_the_cpu(family: str, name: str, tmp_path: Path) -> None:
    quantise(make_checkpoint(family, tmp_path / "plain", **SIZES[family]), tmp_path, name)
    compare(tmp_path / "quantised", is_exact=False)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "awq"),
        ("qwen2", "gptq order"),
        ("qwen2", "gptq 8 v2"),
        ("qwen2", "modelslim W4A8 groups"),
        ("qwen3_moe", "ct int4 zeros"),
        ("qwen3_moe", "modelslim W4A8 groups"),
        ("deepseek_v3", "ct int4"),
    ],
)
def test_groups_of_32(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators take; weights alone are exact."""
    for module in (quantisers, quantiser):
        monkeypatch.setattr(module, "GROUP", 32)
    quantise(make_checkpoint(family, tmp_path / "plain", **SIZES[family]), tmp_path, name)
    path = tmp_path / "quantised" / "config.json"
    path.write_text(path.read_text().replace('"group_size": 16', '"group_size": 32'))
    compare(tmp_path / "quantised", is_exact="modelslim" not in name)


def test_other_schemes_become_plain_numbers(tmp_path: Path) -> None:
    """Weights of 8-bit floats, whose activations are not rounded then."""
    quantise(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path, "ct fp8 weights")
    compare(tmp_path / "quantised", is_exact=True)


def test_inputs_follow_an_order_of_equal_groups() -> None:
    bench = Bench("npu", torch.float32)
    plain = random_weight(bench, PackedInt(4, 32, has_zero_points=True), 48, 96)
    order = (torch.randperm(96, generator=bench.generator) // 32).int().to(bench.torch_device)
    weight = Quantized(
        PackedInt(4, 32, has_zero_points=True, has_g_idx=True), plain.weight, plain.scale, plain.zeros, order
    )
    x = bench.randn(5, 96)
    bench.near(bench.ops.linear(x, bench.ops.pack_quantized(weight), None), expected(x, weight))


def test_four_bits_times_eight() -> None:
    """One product, whose numbers are exact but for scales: every int8 beside every int4, in groups of rows,
    one of them empty."""
    from runtime.devices.ascend.grouped_gemm import GroupQuantExperts, TokenInt4, pack_quantized

    bench = Bench("npu", torch.float32)
    scheme = PackedInt(4, 0, activations="token")
    gate_up, down = random_weight(bench, scheme, 256, 256, (3,)), random_weight(bench, scheme, 256, 128, (3,))
    packed = pack_quantized(gate_up, down, torch.float32)
    assert isinstance(packed, TokenInt4)
    codes = torch.arange(-128, 128).to(torch.int8).repeat(4, 1).npu()
    scales, counts = torch.rand(4).npu(), torch.tensor([3, 0, 1]).npu()
    found = packed.gate_up.multiply(codes.clone(), scales, counts, torch.float32)
    weights = torch.stack([gate_up.weight & 15, gate_up.weight >> 4], -1).flatten(-2).cpu().double() - 8
    for row, expert in enumerate((0, 0, 0, 2)):
        wanted = (
            (codes[row].cpu().double() @ weights[expert].T)
            * gate_up.scale[expert, :, 0].cpu().double()
            * scales[row].item()
        )
        torch.testing.assert_close(
            found[row].cpu().double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item()
        )
    alone = random_weight(bench, scheme, 256, 256, (1,)), random_weight(bench, scheme, 256, 128, (1,))
    in_groups = [
        random_weight(bench, PackedInt(4, 32, activations="token"), 256, ins, (3,)) for ins in (256, 128)
    ]
    for others in (alone, in_groups):
        assert isinstance(pack_quantized(*others, torch.float32), GroupQuantExperts)


@pytest.mark.parametrize(
    ("scheme", "outs", "ins", "lead", "words"),
    [
        (PackedInt(4, 16), 48, 64, (), "each 16 of 64 inputs.*multiples of 32"),
        (PackedInt(4, 32), 44, 64, (), "44 outputs.*multiples of 8"),
        (PackedInt(4, 32), 48, 80, (3,), "each 32 of 80 inputs"),
        (PackedInt(8, 32), 48, 64, (3,), "experts' weights in int8_weight have scales by group"),
        (PackedInt(4, 32, has_zero_points=True, has_g_idx=True), 48, 64, (), "groups of other sizes than 32"),
        (
            PackedInt(4, 32, has_zero_points=True, has_g_idx=True),
            48,
            64,
            (3,),
            "experts' 4-bit weights have an order",
        ),
    ],
)
def test_other_shapes_are_refused(
    scheme: PackedInt, outs: int, ins: int, lead: tuple[int, ...], words: str
) -> None:
    bench = Bench("npu", torch.float32)
    weight = random_weight(bench, scheme, outs, ins, lead)
    with pytest.raises(ModelError, match=words):
        bench.experts.pack_quantized(weight, weight) if lead else bench.ops.pack_quantized(weight)
