"""Layers of experts and their routing on a GPU, in all ways that there are: sections of bench.gpu_gemm."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from bench.gpu import Bench
from bench.gpu_turns import (
    BY_BLOCK,
    CHECKED,
    FRAGMENTS,
    TURNS,
    Calls,
    Compiler,
    in_turn,
    label,
    measured,
    weight_of,
    with_tables,
)
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Scheme

# experts, experts of a token, hidden size, inner size
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "Mixtral-8x7B": (8, 2, 4096, 14_336),
}
CLAMPED = "gpt-oss-20b"  # the one whose experts have biases, and may be in MXFP4
TOKENS = (1, 16, 64, 256, 4096)


def stack_of(bench: Bench, num: int, outs: int, ins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in MXFP4."""
    codes = torch.randint(0, 256, (num, outs, ins // 2), dtype=torch.uint8, device=bench.torch_device)
    size = num, outs, ins // 32
    exponents = torch.randint(114, 120, size, dtype=torch.uint8, device=bench.torch_device)
    return codes, exponents


def clamped_experts(bench: Bench, layer: Any, num: int, hidden: int, inner: int) -> dict[str, Any]:
    """gpt-oss's: name -> layer, packed weights, and stacks in float32 with their biases."""
    from runtime.layers.quantization.mxfp4 import dequantized

    biases = bench.randn(num, 2 * inner), bench.randn(num, hidden)
    stacks = stack_of(bench, num, 2 * inner, hidden), stack_of(bench, num, hidden, inner)
    full = [dequantized(codes.unflatten(2, (-1, 16)), exponents) for codes, exponents in stacks]
    plain = layer.pack_clamped(*(numbers.bfloat16() for numbers in full), biases)
    numbers = (*full, biases)
    return {
        "mxfp4": (layer, layer.pack_clamped_mxfp4(*stacks, biases), numbers),
        "bf16": (layer, plain, numbers),
    }


def expert_ways(bench: Bench, gpu: Any, name: str, schemes: Iterable[Scheme]) -> dict[str, Any]:
    """name -> layer, packed weights, and numbers that the error is measured with: without what activations
    lose where they are quantized, which is about three hundredths."""
    from runtime.devices.cuda.moe import CudaExperts
    from runtime.devices.cuda.weights import pack
    from runtime.layers.quantization.dequantize import dequantized

    layer, torchs = CudaExperts(gpu), CudaExperts(gpu, grouped_from=0)
    num, _, hidden, inner = (4, 2, 256, 128) if bench.is_dry else EXPERTS[name]
    shapes = (2 * inner, hidden), (hidden, inner)
    if name == CLAMPED:
        return clamped_experts(bench, layer, num, hidden, inner)
    full = [bench.randn(num, *shape).mul_(0.02) for shape in shapes]
    packed = layer.pack(*full)
    found: dict[str, Any] = {
        "bf16": (layer, packed, (*full, None)),
        "bf16, torch": (torchs, packed, (*full, None)),
    }
    for scheme in schemes:
        pair = [weight_of(bench, scheme, *shape, (num,)) for shape in shapes]
        numbers = (*(dequantized(one, torch.bfloat16) for one in pair), None)
        plain = tuple(pack(one, frozenset()) for one in pair)
        found[label(scheme)] = layer, plain, numbers
        if plain[0].blocks is not None:
            found[f"{label(scheme)}, by block"] = layer, plain, numbers
        other = tuple(pack(one, FRAGMENTS) for one in pair)
        if other[0].kind == "fragments4":
            found[f"{label(scheme)}, fragments"] = layer, other, numbers
    return found


def expert_reference(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, numbers: Any) -> torch.Tensor:
    """What experts make of the first tokens, one by one in float32."""
    from runtime.models.gpt_oss import ALPHA, LIMIT

    gate_up, down, biases = numbers
    found = []
    for row, places, weights in zip(x[:CHECKED].float(), ids.tolist(), shares, strict=False):
        total = torch.zeros_like(row)
        for place, weight in zip(places, weights, strict=True):
            gate, up = (gate_up[place].float() @ row + (0 if biases is None else biases[0][place])).chunk(2)
            if biases is None:
                inner = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                inner = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            total += (down[place].float() @ inner + (0 if biases is None else biases[1][place])) * weight
        found.append(total)
    return torch.stack(found)


def experts(bench: Bench, gpu: Any, schemes: Iterable[Scheme], names: Iterable[str]) -> dict[str, Any]:
    """A layer of experts without its router; bytes are those of the expected number of experts with
    tokens."""
    figures = bench.figures("experts")
    for name in names:
        num, top_k, hidden, inner = (4, 2, 256, 128) if bench.is_dry else EXPERTS[name]
        for way, (layer, packed, numbers) in expert_ways(bench, gpu, name, schemes).items():
            for tokens in (3,) if bench.is_dry else TOKENS:
                turns = 1 if bench.is_dry or tokens > 256 else TURNS
                ids = [
                    torch.rand(tokens, num, device=bench.torch_device).topk(top_k).indices
                    for _ in range(turns)
                ]
                shares, x = torch.rand(tokens, top_k, device=bench.torch_device), bench.randn(tokens, hidden)
                chosen = 1 - (1 - top_k / num) ** tokens
                size = chosen * sum(one.weight.nbytes for one in packed)
                flops = 6.0 * tokens * top_k * hidden * inner
                calls: Calls = [partial(layer.apply, x, one, shares, packed) for one in ids]
                if way.endswith("by block"):
                    calls = [partial(with_tables, BY_BLOCK, call) for call in calls]
                is_checked = not isinstance(bench, Compiler)
                wanted = expert_reference(x, ids[0], shares, numbers) if is_checked else None
                figures[f"{way} {name}, {tokens} tokens"] = measured(bench, size, flops, calls, wanted)
    return figures


def softmax_topk(logits: torch.Tensor, top_k: int) -> Any:
    """Routing by torch's operators."""
    return logits.softmax(1).topk(top_k)


def routing(bench: Bench) -> dict[str, Any]:
    """Microseconds of routing, ours and torch's softmax with topk."""
    from runtime.devices.cuda.kernels.moe_routing import route

    grouped = Routing(
        top_k=8,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        group_score="two largest",
        normalizes=True,
        scale=2.5,
    )
    figures = bench.figures("routing")
    for name, num, config in (
        ("Qwen3", 128, Routing(top_k=8, normalizes=True)),
        ("DeepSeek-V3", 256, grouped),
    ):
        for tokens in (2,) if bench.is_dry else (1, 256, 4096):
            logits = torch.randn(tokens, num, device=bench.torch_device)
            ours, _ = in_turn(bench, [partial(route, logits, None, config)])
            others, _ = in_turn(bench, [partial(softmax_topk, logits, config.top_k)])
            figures[f"{name}, {tokens} tokens"] = {
                "ours_us": round(ours * 1e6, 1),
                "softmax_topk_us": round(others * 1e6, 1),
            }
    return figures
