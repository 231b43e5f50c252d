"""gpt-oss with its experts in MXFP4: the tokens of transformers with the same numbers in full."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.devices.cpu.self_check import load_library
from runtime.layers.quantization.float4 import VALUES
from runtime.layers.quantization.mxfp4 import GROUP, dequantized
from tests.devices.cpu.ranks import RunRanks
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 70)), [200, 100]]
NUM_TOKENS = 12


def coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, inputs, outputs] -> blocks and scales: each number to the nearest of the group's scale."""
    groups = weight.transpose(1, 2).float().unflatten(2, (-1, GROUP))
    exponents = (
        torch.frexp(groups.abs().amax(-1)).exponent - 3
    )  # the largest number is 4 to 6 times the scale
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1))
    codes = (scaled.unsqueeze(-1) - VALUES).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def make_pair(folder: Path, dtype: str) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one with the same numbers in full."""
    full, quantized = (
        make_checkpoint(
            "gpt_oss", folder / name, dtype=dtype, intermediate_size=64, num_hidden_layers=2, **more
        )
        for name, more in (("full", {}), ("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}))
    )
    tensors = load_file(full / "model.safetensors")
    written = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = coded(written.pop(name))
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(plain, dequantized(blocks, scales).transpose(1, 2))
            tensors[name] = plain.to(tensor.dtype).contiguous()
    save_file(tensors, full / "model.safetensors", {"format": "pt"})
    save_file(written, quantized / "model.safetensors", {"format": "pt"})
    return quantized, full


def test_tokens_in_float32(tmp_path: Path) -> None:
    quantized, full = make_pair(tmp_path, "float32")
    reference = Reference(full)
    executor, ready = start(quantized)
    planner = Planner(executor, ready, 4)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for _ in range(NUM_TOKENS - 1):
        planner.run(rows, [])
    found = [row.tokens[row.prompt_len :] for row in rows]
    assert found == [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.skipif(load_library() is None, reason="the kernels are not built")
def test_kernels_keep_four_bits(tmp_path: Path) -> None:
    """In bfloat16 the kernels compute with the codes: the same probabilities, with fewer bytes."""
    found, sizes = [], []
    for folder in make_pair(tmp_path, "bfloat16"):
        executor, ready = start(folder)
        planner = Planner(executor, ready, 4)
        row = planner.row(0, PROMPTS[1], sampling(prompt_logprobs=0))
        planner.prefill(row, chunk=17)
        assert executor.runner.forward.program is not None  # type: ignore[attr-defined]
        found.append(torch.cat([torch.from_numpy(part.logprobs) for part in row.prompt])[:-1])
        sizes.append(ready.weights_bytes)
    assert torch.allclose(*found, atol=0.05) and len(found[0]) == len(PROMPTS[1]) - 1
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks(dtype: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """Each has half of every expert, in bfloat16 in whole groups of its codes."""
    folder, _ = make_pair(tmp_path, dtype)
    (alone,), (ranks,) = (list(zip(*run_ranks(size, [folder], tmp_path), strict=True)) for size in (1, 2))
    first = slice(None if dtype == "float32" else 3)  # of what is sampled; then tokens may differ
    assert dtype == "bfloat16" or alone[0]["tokens"] == ranks[0]["tokens"]
    assert ranks[0]["logprobs"][first] == pytest.approx(alone[0]["logprobs"][first], abs=0.05)
    assert ranks[0]["bytes"] < 0.8 * alone[0]["bytes"]
