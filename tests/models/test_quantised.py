"""Quantised checkpoints of every format against transformers with the weights that they stand for, and inputs
rounded as they ask."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from runtime.models.config.quantization_schemes import check_supported
from tests.devices.drive import Planner, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.quantise import FORMATS, GROUP, SQUARE, Round, quantise
from tests.models.quantise_tiles import TILED
from tests.models.reference import Reference

PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE, 30).tolist()
# not w4afp8, which has experts in 4 bits, and those of test_tiled_quantization.py
DENSE = [name for name in FORMATS if name != "w4afp8" and name not in TILED]


def reference(folder: Path, rounds: dict[str, Round]) -> Reference:
    """transformers, with inputs of quantised modules rounded."""
    found = Reference(folder)
    for name, module in found.model.named_modules():
        if name in rounds:
            module.register_forward_pre_hook(lambda _, given, of=rounds[name]: (of(given[0]),))
    return found


def log_probabilities(folder: Path, num_tokens: int = 6, **options: Any) -> tuple[Tensor, list[int]]:
    """Of the prompt's tokens, and a greedy continuation."""
    executor, ready = start(folder, **options)
    planner = Planner(executor, ready, options.get("page_size", 4))
    row = planner.row(0, PROMPT, sampling(prompt_logprobs=0))
    planner.prefill(row, chunk=17)
    while len(row.tokens) < len(PROMPT) + num_tokens:
        planner.run([row], [])
    return torch.from_numpy(np.concatenate([part.logprobs for part in row.prompt])[:-1]), row.tokens


def wanted(found: Reference, tokens: list[int]) -> Tensor:
    lines = found.logprobs(tokens)
    return lines[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


@pytest.mark.parametrize("name", DENSE)
def test_each_format_means_what_its_tool_wrote(name: str, tmp_path: Path) -> None:
    """An input on the edge of two codes may be rounded either way, so with rounded inputs single tokens
    differ a little more."""
    plain = make_checkpoint("qwen2", tmp_path / "plain")
    rounds = quantise(plain, tmp_path, name)
    assert len(rounds) == 14
    found, tokens = log_probabilities(tmp_path / "quantised")
    expected = wanted(reference(tmp_path / "meant", rounds), tokens)[: len(found)]
    inputs = torch.randn(3, 64)
    is_rounded = not torch.equal(next(iter(rounds.values()))(inputs), inputs)
    torch.testing.assert_close(found, expected, atol=5e-2 if is_rounded else 1e-4, rtol=0)
    assert (found - expected).abs().mean() < (5e-3 if is_rounded else 2e-5)
    other = wanted(Reference(plain), tokens)[: len(found)]
    # or the checkpoint was read as if it were plain
    assert (found - other).abs().mean() > 10 * (found - expected).abs().mean()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "ct int4"),
        ("qwen3_moe", "gptq order"),
        ("qwen2_moe", "gptq"),
        ("qwen2_moe", "ct fp8 weights"),
        ("deepseek_v2", "ct int4 zeros"),
        ("deepseek_v3", "gptq 8 v2"),
        ("deepseek_v3", "ct fp8 weights"),
        ("qwen3_moe", "w4afp8"),
        ("qwen3_moe", "modelopt nvfp4"),
        ("qwen2_moe", "nf4 double"),
        ("deepseek_v3", "ct mxfp4"),
        ("deepseek_v2", "auto-round"),
        ("qwen3_moe", "gptq 3"),
    ],
)
def test_experts_and_latents(family: str, name: str, tmp_path: Path) -> None:
    """Weights alone are exact, so the tokens are those of transformers with what the weights mean."""
    sizes = {"moe_intermediate_size": 32} | (
        {"shared_expert_intermediate_size": 48} if family == "qwen2_moe" else {}
    )
    sizes |= (
        {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16}
        if family.startswith("deepseek")
        else {}
    )
    plain = make_checkpoint(family, tmp_path / "plain", **sizes)
    quantise(plain, tmp_path, name, leave=("self_attn",) if name == "w4afp8" else ())
    found, tokens = log_probabilities(tmp_path / "quantised")
    meant = Reference(tmp_path / "meant")
    assert tokens[len(PROMPT) :] == meant.greedy(PROMPT, 6)
    torch.testing.assert_close(found, wanted(meant, tokens)[: len(found)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "fp8 block"),
        ("qwen3_moe", "modelslim W4A8_DYNAMIC"),
        ("qwen3_moe", "modelslim W8A8"),
        ("deepseek_v3", "fp8 block"),
        ("deepseek_v3", "modelslim W8A8_DYNAMIC"),
        ("deepseek_v2", "fp8"),
        ("deepseek_v3", "ct int8"),
    ],
)
def test_rounded_experts_and_latents(family: str, name: str, tmp_path: Path) -> None:
    """transformers keeps experts in stacks where no hook can round their inputs, so this is nearness to the
    weights' meaning."""
    plain = make_checkpoint(family, tmp_path / "plain", **{"moe_intermediate_size": 32})
    quantise(plain, tmp_path, name)
    found, tokens = log_probabilities(tmp_path / "quantised")
    expected = wanted(Reference(tmp_path / "meant"), tokens)[: len(found)]
    assert (found - expected).abs().mean() < 0.12 * expected.abs().mean()


@pytest.mark.parametrize(
    ("quantization", "family"),
    [
        ("fp8", "llama"),
        ("w8a8_int8", "qwen2"),
        ("w8a8_fp8", "qwen3_moe"),
        ("fp8", "deepseek_v3"),
        ("torchao:int8wo", "qwen3_moe"),
        ("torchao:fp8wo", "qwen2"),
        ("torchao:int4wo-32", "llama"),
    ],
)
def test_plain_checkpoints_are_quantised_while_loaded(quantization: str, family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    found, tokens = log_probabilities(folder, quantization=quantization)
    expected = wanted(Reference(folder), tokens)[: len(found)]
    bound = 0.3 if "int4" in quantization else 0.1
    assert 1e-4 < (found - expected).abs().mean() < bound * expected.abs().mean()


@pytest.mark.parametrize(
    "name", ["awq", "fp8 block", "ct int8 static", "modelslim W4A8_DYNAMIC", "ct int8 order"]
)
def test_random_weights_need_no_files(name: str, tmp_path: Path) -> None:
    quantise(make_checkpoint("qwen3_moe", tmp_path / "plain", moe_intermediate_size=32), tmp_path, name)
    (tmp_path / "quantised" / "model.safetensors").unlink()
    answers = [
        log_probabilities(tmp_path / "quantised", load_format="dummy", seed=seed)[0] for seed in (1, 1, 2)
    ]
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])
    assert bool(answers[0].isfinite().all())


def test_modules_that_the_files_have_in_full_are_plain(tmp_path: Path) -> None:
    """Whatever the list of exceptions says, or does not say."""
    plain = make_checkpoint("llama", tmp_path / "plain")
    quantise(plain, tmp_path, "awq", leave=("layers.0.", "o_proj"))
    _, tokens = log_probabilities(tmp_path / "quantised")
    assert tokens[len(PROMPT) :] == Reference(tmp_path / "meant").greedy(PROMPT, 6)


def test_a_quantised_model_takes_less_memory(tmp_path: Path) -> None:
    """Of the layers' weights in float32, an eighth and the groups' scales, or a quarter."""
    plain = make_checkpoint("llama", tmp_path / "plain")
    shares = {"awq": 0.5 + 5 / GROUP, "ct int8": 1 + 4 / 64, "fp8 block": 1 + 4 / SQUARE}
    whole = start(plain)[1].weights_bytes
    layers = sum(t.nbytes for key, t in load_file(plain / "model.safetensors").items() if "_proj" in key)
    for name, number_bytes in shares.items():
        quantise(plain, tmp_path / name, name)
        found = start(tmp_path / name / "quantised")[1].weights_bytes
        assert found - (whole - layers) == pytest.approx(layers / 4 * number_bytes, rel=0.03)


def damaged(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


Q, K = (f"model.layers.0.self_attn.{name}_proj." for name in "qk")
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], list[str]]] = {
    "no zeros": ("awq", lambda t: t.pop(Q + "qzeros"), ["lacks 1 ", "q_proj.qzeros"]),
    "no scale": (
        "fp8",
        lambda t: t.pop(Q + "weight_scale"),
        ["quantised differently", "q not at all", "k fp8"],
    ),
    "shape of scales": (
        "awq",
        lambda t: t.update({Q + "scales": t[Q + "scales"][:2].clone()}),
        ["scales", "[2, 64]", "[4, 64]"],
    ),
    "other type": (
        "gptq",
        lambda t: t.update({Q + "qweight": t[Q + "qweight"].to(torch.int64)}),
        ["qweight", "I64", "I32"],
    ),
    "orders differ": (
        "gptq order",
        lambda t: t.update({K + "g_idx": t[K + "g_idx"].flip(0)}),
        ["differ in their order"],
    ),
    "order without desc_act": (
        "gptq",
        lambda t: t.update({Q + "g_idx": t[Q + "g_idx"].flip(0)}),
        ["g_idx", "desc_act"],
    ),
    "unknown bias": (
        "gptq",
        lambda t: t.update({Q + "bias": torch.ones(64)}),
        ["bias that config.json does not know of"],
    ),
    "offsets": (
        "modelslim W8A8_DYNAMIC",
        lambda t: t[Q + "weight_offset"].fill_(1),
        ["offsets", "symmetrically"],
    ),
    "input scales differ": (
        "ct int8 static",
        lambda t: t[K + "input_scale"].mul_(2),
        ["differ in their input_scale"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refuses(damage: str, tmp_path: Path) -> None:
    name, change, words = DAMAGES[damage]
    quantise(make_checkpoint("llama", tmp_path / "plain"), tmp_path, name)
    with pytest.raises(ModelError) as caught:
        start(damaged(tmp_path / "quantised", change))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


def test_a_device_says_what_it_lacks(tmp_path: Path) -> None:
    quantise(make_checkpoint("llama", tmp_path / "plain"), tmp_path, "awq")
    sentence = check_supported(
        read_config(tmp_path / "quantised").quantization.schemes, ("int8", "fp8"), "abacus"
    )
    assert sentence is not None and all(
        word in sentence for word in ("int4_weight", "--device abacus", "int8, fp8")
    )
    assert check_supported(("fp8",), ("int8", "fp8"), "abacus") is None


@pytest.mark.parametrize("below", ["", "k_proj.", "attn."])
def test_scales_of_an_fp8_cache(below: str, tmp_path: Path) -> None:
    """Powers of two, with which an fp8 cache holds other numbers that mean the same; another cache has no use
    for them."""
    quantise(make_checkpoint("qwen3", tmp_path / "plain"), tmp_path, "ct int4")
    folder, caches, answers = tmp_path / "quantised", [], []
    wide = log_probabilities(folder)[0]
    names = [f"model.layers.1.self_attn.{below.replace('k_', kind + '_')}{kind}_scale" for kind in "kv"]
    for scales in ({}, {names[0]: torch.tensor(0.125), names[1]: torch.tensor([0.5])}):
        damaged(folder, lambda tensors, more=scales: tensors.update(more))
        executor, ready = start(folder, kv_dtype="fp8_e4m3")
        planner = Planner(executor, ready, 4)
        row = planner.row(0, PROMPT, sampling(prompt_logprobs=0))
        planner.prefill(row, chunk=17)
        answers.append(torch.from_numpy(np.concatenate([part.logprobs for part in row.prompt])[:-1]))
        layer = executor.runner.kv[1]  # type: ignore[attr-defined]
        caches.append([cache.float()[row.pages[0] * 4] for cache in layer])
    smallest = 2**-9  # of float8: below, powers of two make a difference
    torch.testing.assert_close(answers[1], answers[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(caches[1][0] / 8, caches[0][0], atol=smallest, rtol=0)
    torch.testing.assert_close(caches[1][1] / 2, caches[0][1], atol=smallest, rtol=0)
    assert torch.equal(log_probabilities(folder)[0], wide)


def test_given_scales_of_an_fp8_cache(tmp_path: Path) -> None:
    """They take the place of the checkpoint's, of which this one, plain as it is, has none."""
    folder, caches = make_checkpoint("qwen3", tmp_path), []
    for scales in ((), ((1.0, 0.125),)):
        executor, ready = start(folder, kv_dtype="fp8_e4m3", cache_scales=scales)
        planner = Planner(executor, ready, 4)
        row = planner.row(0, PROMPT, sampling())
        planner.prefill(row)
        layers = executor.runner.kv  # type: ignore[attr-defined]
        caches.append([[cache.float()[row.pages[0] * 4] for cache in layer] for layer in layers])
    for whole, scaled in zip(caches[0][0], caches[1][0], strict=True):
        assert torch.equal(whole, scaled)
    for whole, scaled in zip(caches[0][1], caches[1][1], strict=True):
        torch.testing.assert_close(scaled / 8, whole, atol=2**-9, rtol=0)


def test_what_some_tools_write_besides(tmp_path: Path) -> None:
    """Zero biases of modules that have none, and zero points of symmetric weights."""
    cases: tuple[tuple[str, dict[str, Tensor]], ...] = (
        ("gptq", {Q + "bias": torch.zeros(64)}),
        ("ct int8", {Q + "weight_zero_point": torch.zeros(64, 1, dtype=torch.int8)}),
    )
    for name, more in cases:
        quantise(make_checkpoint("llama", tmp_path / name / "plain"), tmp_path / name, name)
        folder = tmp_path / name / "quantised"
        before = log_probabilities(folder)[0]
        damaged(folder, lambda tensors, more=more: tensors.update(more))
        assert torch.equal(log_probabilities(folder)[0], before)


def test_norms_may_have_a_bias(tmp_path: Path) -> None:
    """Where modelslim moved outliers out of the weights behind them."""
    rounds = quantise(make_checkpoint("llama", tmp_path / "plain"), tmp_path, "modelslim W8A8_DYNAMIC")
    generator = torch.Generator().manual_seed(1)
    modules = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    biases = {name: torch.randn(64, generator=generator) / 4 for name in modules}
    damaged(
        tmp_path / "quantised",
        lambda tensors: tensors.update({name + ".bias": bias for name, bias in biases.items()}),
    )
    meant = reference(tmp_path / "meant", rounds)
    for name, module in meant.model.named_modules():
        if name in biases:
            module.register_forward_hook(lambda _, given, out, bias=biases[name]: out + bias)
    found, tokens = log_probabilities(tmp_path / "quantised")
    assert (found - wanted(meant, tokens)[: len(found)]).abs().mean() < 5e-3
    assert (found - wanted(reference(tmp_path / "meant", rounds), tokens)[: len(found)]).abs().mean() > 0.1


@pytest.mark.parametrize("name", ["awq", "fp8 block", "ct int8", "modelslim W8A8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(name: str, dtype: str, tmp_path: Path) -> None:
    quantise(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path, name)
    found, expected = (
        log_probabilities(tmp_path / "quantised", dtype=kind)[0] for kind in (dtype, "float32")
    )
    assert (found - expected).abs().mean() < 0.03 * expected.abs().mean()
