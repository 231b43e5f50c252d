"""Attention whose warps have roles, by a double of their language, against the definition in float64."""

from dataclasses import replace

import pytest
import torch

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_tiles import PROMPTS
from runtime.devices.cuda.kernels import attention_roles
from tests.devices.cuda.gluon_double import Double
from tests.devices.cuda.test_attention import check
from tests.devices.cuda.test_attention_tiles import BF16, HOPPER, choose
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
