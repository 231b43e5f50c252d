"""Attention whose warps have roles, by a double of their language, against the definition in float64."""

from dataclasses import replace
from math import nan

import pytest
import torch

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention import AttentionLaunch, AttentionPlan, launch_attention
from runtime.devices.cuda.attention_tiles import PROMPTS
from runtime.devices.cuda.attention_tiles import ROLES as LATENT_ROLES
from runtime.devices.cuda.kernels import attention_roles, latent_roles
from tests.devices.cuda.gluon_double import Double
from tests.devices.cuda.test_attention import check
from tests.devices.cuda.test_attention_tiles import BF16, HOPPER, check_latents, choose
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE

pytestmark = pytest.mark.skipif(HAS_GPU, reason="test_attention_tiles.py runs the kernel itself")
ROLES = [name for name, tile in PROMPTS.items() if tile.walk.groups]


@pytest.mark.parametrize("name", ROLES)
def test_groups_of_warps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than stages, rows and prefixes that end within a page, and a row of one token; and more
    tiles than multiprocessors, which persistent programs take one after the other."""
    double = Double(attention_roles.prompt_attention_kernel)
    monkeypatch.setattr(attention_roles, "prompt_attention_kernel", double)
    choose(monkeypatch, "prompt", PROMPTS[name])
    check([(0, 70), (405, 60), (130, 1)], 0, (8, 2), (128, 128), 64, BF16, Scores(0.09), gpu=HOPPER)
    assert double.grid == (double.program[0] + 1,)
    few = replace(HOPPER, num_cores=3)
    check([(63, 90), (5, 75)], 0, (6, 2), (128, 128), 128, BF16, Scores(0.09), gpu=few)
    assert (double.grid == (3,)) == PROMPTS[name].walk.persists


def test_what_roles_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, float16 and few tiles of many keys have the default."""
    monkeypatch.setattr(attention_roles, "prompt_attention_kernel", None)
    choose(monkeypatch, "prompt", PROMPTS[ROLES[0]])
    sinks = torch.zeros(4, device=TORCH_DEVICE)
    check([(0, 40)], 0, (4, 2), (128, 128), 64, BF16, Scores(0.09, sinks=sinks), gpu=HOPPER)
    check([(1100, 33)], 0, (4, 2), (128, 128), 64, BF16, Scores(0.09), gpu=HOPPER)


def latent_double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double(latent_roles.latent_attention_kernel)
    monkeypatch.setattr(latent_roles, "latent_attention_kernel", double)
    return double


def test_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of few heads and of more than a tile has; keys that are split, with parts that are empty, and
    more tiles in a part than stages."""
    double = latent_double(monkeypatch)
    few = replace(HOPPER, num_cores=6)
    check_latents("few latents", LATENT_ROLES, 16, monkeypatch, [(700, 1), (3, 1), (63, 1)], 64, few)
    assert double.grid == (3, 1, 2)
    check_latents("latents", LATENT_ROLES, 80, monkeypatch, [(190, 1)], 128, HOPPER)
    assert double.grid == (1, 2, 1)


def test_chunks_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several queries behind prefixes that end within a page: tiles of tokens times all heads."""
    double = latent_double(monkeypatch)
    check_latents("latents", LATENT_ROLES, 20, monkeypatch, [(0, 7), (130, 4)], 64, HOPPER)
    assert double.grid == (5, 1, 1)


def test_rows_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of a captured step gives zeros, whatever its page holds."""
    latent_double(monkeypatch)
    choose(monkeypatch, "few latents", LATENT_ROLES)
    rows = torch.tensor([[0, 0], [0, 5], [0, 0], [0, 1]], dtype=torch.int32)
    table = torch.zeros(1, 1, 64, dtype=torch.int32)
    plan = AttentionPlan((AttentionLaunch(rows, 0, 2, 4096, None),), table, 64)
    q, rope, latents, ropes = (
        torch.full((num, heads, dim), value, dtype=BF16)
        for num, heads, value, dim in ((2, 4, 1.0, 512), (2, 4, 1.0, 64), (64, 1, nan, 512), (64, 1, nan, 64))
    )
    found = torch.full_like(q, nan)
    launch_attention(found, q, latents, latents, plan.launches[0], plan, Scores(0.05), HOPPER, rope, ropes)
    assert torch.equal(found, torch.zeros_like(q))
