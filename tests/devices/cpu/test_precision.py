"""How far the kernels are from exact sums: log probabilities of whole models in each format of weights, next
to the same weights dequantized to float32 and computed in float32. docs/cpu.md has the bounds.

The head counts too: with --quantization int8 and int4 it has 8 bits here, and all its bits in the reference.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer
from torch import Tensor

from runtime import pocket
from runtime.devices.base import Quantized
from runtime.devices.cpu.kernels import choice
from runtime.devices.cpu.kernels.levels import supported_levels
from runtime.devices.cpu.matrices import Matrix
from runtime.devices.cpu.moe import CpuExperts, ExpertStack, ExpertWeights
from runtime.devices.cpu.ops import CpuOps
from runtime.layers.quantization.dequantize import dequantized
from tests.devices.drive import Planner, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.make_gguf import write_gguf

BUILT = [level.name for level in supported_levels() if level.path.is_file()]
POCKET = Path(pocket.__file__).parent
POCKET_VOCABULARY = 2560
TEXT = """The tortoise asked for a longer race. "You run well," it said to the hare, "but only while someone
looks. I go where I go." They left at noon. By the evening the hare had slept twice, eaten once, and told the
story of its victory to a fox, who wrote it down: three pages, two pictures and a map of the road.
def area(width: float, height: float) -> float:
    return width * height
"""


@dataclass(frozen=True)
class Format:
    """Weights of a model, and how far from float32 it may be."""

    name: str  # of the row in docs/cpu.md
    mean_kl: float  # nats a position, of the distribution in float32 to that of the kernels
    largest: float  # difference of a log probability, of any token at any position
    quantization: str | None = None
    ggml: Type | None = None  # the type of all matrices of a GGUF file


# twice what was measured on avx512_bf16, for pocket in a text
FORMATS = (
    Format("bfloat16", 0.0005, 0.4),
    Format("fp8", 0.0005, 0.6, "fp8"),
    Format("int8", 0.005, 3.0, "int8"),
    Format("int4", 0.0025, 1.0, "int4"),
    Format("Q8_0", 0.0035, 2.5, ggml=Type.Q8_0),
    Format("Q4_0", 0.0035, 1.2, ggml=Type.Q4_0),
)
# the same for tiny models of random weights; Q4_K and Q6_K are random codes
RANDOM = (
    ("llama", Format("bfloat16", 0.006, 1.5)),
    ("llama", Format("fp8", 0.003, 0.8, "fp8")),
    ("llama", Format("int8", 0.03, 3.5, "int8")),
    ("llama", Format("int4", 0.02, 2.0, "int4")),
    ("llama", Format("Q4_K", 0.0001, 0.1, ggml=Type.Q4_K)),
    ("llama", Format("Q6_K", 0.001, 0.4, ggml=Type.Q6_K)),
    ("qwen3_moe", Format("bfloat16", 0.0015, 0.6)),
    ("qwen3_moe", Format("int8", 0.007, 1.5, "int8")),
    ("qwen3_moe", Format("int4", 0.006, 1.5, "int4")),
)


def dequantized_linear(ops: CpuOps, weight: Quantized) -> Tensor | Matrix:
    """In place of CpuOps.pack_quantized: no sum of the reference is one of integers."""
    return ops.pack_linear(dequantized(weight, torch.float32))


def dequantized_experts(
    experts: CpuExperts, gate_up: Quantized, down: Quantized
) -> list[ExpertWeights] | ExpertStack:
    """In place of CpuExperts.pack_quantized."""
    return experts.pack(*(dequantized_stack(weight) for weight in (gate_up, down)))


def dequantized_stack(weight: Quantized) -> Tensor:
    count = len(weight.weight)
    zeros = weight.zeros if weight.zeros is not None else [None] * count
    each = (
        replace(weight, weight=weight.weight[i], scale=weight.scale[i], zeros=zeros[i]) for i in range(count)
    )
    return torch.stack([dequantized(one, torch.float32) for one in each])


def distributions(model: Path, ids: list[int], vocabulary: int, **options: object) -> Tensor:
    """Log probabilities of all tokens behind each of `ids` but the last, float64 [positions, vocabulary]."""
    executor, ready = start(model, num_threads=2, **options)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, ids, sampling(prompt_logprobs=vocabulary))
    planner.prefill(row, 50)
    parts = []
    for found in row.prompt:
        order = torch.from_numpy(found.top_ids.reshape(-1, vocabulary).copy()).long()
        values = torch.from_numpy(found.top_logprobs.reshape(-1, vocabulary).copy()).double()
        parts.append(torch.empty_like(values).scatter_(1, order, values))
    return torch.cat(parts)[: len(ids) - 1]


def errors(
    model: Path, ids: list[int], vocabulary: int, quantization: str | None, patch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """The mean KL divergence, and the largest difference of a log probability."""
    patch.setenv(choice.VARIABLE, BUILT[0])
    found = distributions(model, ids, vocabulary, dtype="bfloat16", quantization=quantization)
    patch.setattr(CpuOps, "pack_quantized", dequantized_linear)
    patch.setattr(CpuExperts, "pack_quantized", dequantized_experts)
    exact = distributions(model, ids, vocabulary, dtype="float32", quantization=quantization)
    return float((exact.exp() * (exact - found)).sum(1).mean()), float((exact - found).abs().max())


def of_form(folder: Path, family: str, form: Format, tmp_path: Path) -> Path:
    """The model as the format has it: the folder itself, or a GGUF file of it."""
    if form.ggml is None:
        return folder
    path, kind = tmp_path / "model.gguf", form.ggml
    write_gguf(folder, path, family, lambda _: kind)
    return path


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    """TEXT in pocket's tokens."""
    return Tokenizer.from_file(str(POCKET / "tokenizer.json")).encode(TEXT).ids


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_pocket(form: Format, text_ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_form(POCKET, "qwen3", form, tmp_path)
    mean, largest = errors(model, text_ids, POCKET_VOCABULARY, form.quantization, monkeypatch)
    assert 0 <= mean < form.mean_kl and largest < form.largest


@pytest.mark.parametrize(
    ("family", "form"), RANDOM, ids=lambda one: one if isinstance(one, str) else one.name
)
def test_random_weights(family: str, form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(family, tmp_path / "hf", hidden_size=256, intermediate_size=256)
    model = of_form(folder, family, form, tmp_path)
    ids = [7 * i * i % VOCAB_SIZE for i in range(60)]
    mean, largest = errors(model, ids, VOCAB_SIZE, form.quantization, monkeypatch)
    assert 0 <= mean < form.mean_kl and largest < form.largest


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_model_gives_the_same_bits_in_any_company(
    form: Format, text_ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt alone, then decoding in company; and cut in two, beside other prompts."""
    monkeypatch.setenv(choice.VARIABLE, BUILT[0])
    model = of_form(POCKET, "qwen3", form, tmp_path)
    executor, ready = start(model, num_threads=2, dtype="bfloat16", quantization=form.quantization)
    planner, found = Planner(executor, ready, 4), []
    for others in (0, 4):
        prompts = [text_ids[:45], *(text_ids[i : i + 10 * i] for i in range(1, 1 + others))]
        rows = [planner.row(i, prompt, sampling(top_logprobs=20)) for i, prompt in enumerate(prompts)]
        first = 45 - 8 * others
        planner.run([], [(rows[0], first), *((row, row.prompt_len) for row in rows[1:])])
        if others:
            planner.run(rows[1:], [(rows[0], 45 - first)])
        for _ in range(3):
            planner.run(rows, [])
        found.append(rows[0].results)
    assert found[0] == found[1]


def test_the_bounds_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    wanted = [(f"pocket, {form.name}", form) for form in FORMATS]
    wanted += [(f"{family}, {form.name}", form) for family, form in RANDOM]
    assert rows == [(name, f"{form.mean_kl:g}", f"{form.largest:g}") for name, form in wanted]
