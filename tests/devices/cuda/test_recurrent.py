"""One token of recurrent layers against their definition in torch: scans and delta rules of several sizes,
states of both kinds, and a whole model."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cuda.flashinfer_states import FlashInferStateSteps, open_state_steps
from runtime.devices.cuda.kernels.recurrent import TritonStateSteps
from runtime.devices.progress import without_progress
from runtime.errors import StartError
from runtime.layers.recurrent.delta_rule import delta_step, unit
from runtime.layers.recurrent.mamba2 import scan_step
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.cuda import states_double
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE, near
from tests.devices.drive import Planner, start_rank
from tests.models.compare import expected_of, in_company, random_prompts
from tests.models.make import make_checkpoint

SLOTS = torch.tensor([4, 1, 2])
TYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(found: Tensor, state: Tensor, expected: Tensor, after: Tensor, before: Tensor) -> None:
    """Outputs, the states at SLOTS, and that no other has changed."""
    near(found, expected, torch.float32)
    near(state[SLOTS.to(state.device)], after.to(state.dtype), state.dtype)
    others = [slot for slot in range(len(before)) if slot not in SLOTS.tolist()]
    assert torch.equal(state[others].cpu(), before[others])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("groups", "heads", "size", "kept"), [(1, 4, 64, 128), (2, 6, 10, 24), (3, 3, 33, 5)]
)
def test_scan(groups: int, heads: int, size: int, kept: int, dtype: torch.dtype) -> None:
    rows = len(SLOTS)
    before = random(6, heads, size, kept, seed=1).to(dtype)
    a, step = -random(heads, seed=2).exp(), random(rows, heads, seed=3).exp()
    inputs = (random(rows, heads, size, seed=4), step, *(random(rows, groups, kept, seed=s) for s in (5, 6)))
    expected, after = scan_step(a, inputs, before[SLOTS].float())
    state = before.clone().to(TORCH_DEVICE)
    given = tuple(x.to(TORCH_DEVICE) for x in inputs)
    found = TritonStateSteps().scan(a.to(TORCH_DEVICE), given, state, SLOTS.to(TORCH_DEVICE))
    check(found, state, expected, after, before)


@pytest.mark.parametrize("dtype", TYPES)
def test_scan_of_flashinfer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a double of the package."""
    states_double.install(monkeypatch)
    rows, groups, heads, size, kept = len(SLOTS), 2, 6, 10, 24
    before = random(6, heads, size, kept, seed=1).to(dtype)
    a, step = -random(heads, seed=2).exp(), random(rows, heads, seed=3).exp()
    inputs = (random(rows, heads, size, seed=4), step, *(random(rows, groups, kept, seed=s) for s in (5, 6)))
    expected, after = scan_step(a, inputs, before[SLOTS].float())
    state = before.clone()
    found = FlashInferStateSteps().scan(a, inputs, state, SLOTS)
    check(found, state, expected, after, before)


def test_a_start_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", None)
    with pytest.raises(StartError, match="--mamba-backend flashinfer.*pip install"):
        open_state_steps("flashinfer")
    assert open_state_steps("torch_native") is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "keys", "values", "is_wide"), [(4, 128, 128, False), (3, 12, 20, True)])
def test_delta_rule(heads: int, keys: int, values: int, is_wide: bool, dtype: torch.dtype) -> None:
    rows = len(SLOTS)
    before = random(6, heads, keys, values, seed=1).to(dtype)
    q, k = (unit(random(rows, heads, keys, seed=seed)) for seed in (2, 3))
    g = -random(rows, heads, keys if is_wide else 1, seed=4).exp()
    inputs = (q, k, random(rows, heads, values, seed=5), g, random(rows, heads, seed=6).sigmoid())
    expected, after = delta_step(inputs, before[SLOTS].float())
    state = before.clone().to(TORCH_DEVICE)
    given = tuple(x.to(TORCH_DEVICE) for x in inputs)
    found = TritonStateSteps().delta(given, state, SLOTS.to(TORCH_DEVICE))
    check(found, state, expected, after, before)


@pytest.mark.skipif(HAS_GPU, reason="a rank of the cpu")
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "kimi_linear"])
def test_models_decode_with_them(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        return replace(open_device(start, rank, dtype), state_steps=TritonStateSteps())

    for name in ("scan", "delta"):
        plain = getattr(TritonStateSteps, name)

        def counted(*args: object, plain: object = plain) -> Tensor:
            calls.append(len(args))
            return plain(*args)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(TritonStateSteps, name, counted)
    prompts, count = random_prompts(3, 9), 4
    expected = expected_of(make_checkpoint(family, tmp_path), prompts, count)
    message = start_rank(tmp_path, num_states=12, recurrent_backend="torch_native")
    rank = TorchExecutor(start_torch_rank(0, message, without_progress, opened, FACTS))
    assert in_company(Planner(rank, rank.ready, 4), prompts, count, chunk=1000) == expected.tokens
    assert calls
