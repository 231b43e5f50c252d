"""Prompts by cuDNN: over pages where its graphs are there (a double of them without a GPU), gathered
elsewhere, and expanded latents, against the definition in float64."""

import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import cudnn
from runtime.devices.cuda.cudnn_pages import open_paged_sdpa
from tests.devices.cuda import cudnn_double
from tests.devices.cuda.test_attention import MIXED
from tests.devices.cuda.test_attention_backends import CASES, check, ops_of
from tests.devices.cuda.test_latent_backends import BF16, PAGE, SCALE, Latents
from tests.devices.cuda.torch_device import HAS_GPU, near


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's graphs, and no torch in their place."""
    if not HAS_GPU:
        cudnn_double.install(monkeypatch)
        monkeypatch.setattr(cudnn, "attend_gathered", None)
    elif find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed here")


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("case", CASES)
def test_prompts_over_pages(case: str) -> None:
    """Whole prompts and those behind prefixes, in pages of all sizes; and what is for our own kernel."""
    ops = ops_of("cudnn", "triton", BF16)
    for _ in range(2):  # a graph is built once for a shape
        check(ops, MIXED, 3, CASES[case], dim=64)
    check(ops, [(0, 5), (70, 9)], 0, CASES[case], heads=(4, 1), dim=128, page_size=64)
    if not HAS_GPU:
        assert len(cudnn_double.pygraph.built) == (2 if case == "plain" else 0)


@pytest.mark.usefixtures("pages")
def test_latents_over_pages() -> None:
    """Expanded prompts attend by cuDNN, with heads of two sizes; a short one is absorbed."""
    latents_near("triton")
    if not HAS_GPU:
        (built,) = cudnn_double.pygraph.built
        q, _, v = built.inputs[:3]
        assert (q.dim or [])[3] == 88 and (v.dim or [])[3] == 16


def latents_near(decode: str) -> None:
    """Compares rows of latents with the definition."""
    ops, case = ops_of("cudnn", decode, BF16), Latents([(70, 1), (0, 9), (64, 24), (40, 40)])
    rows = AttentionRows(1, np.arange(4, dtype=np.int32), case.starts, case.counts)
    plan = ops.plan_attention(rows, case.table, PAGE, (0,))
    found = ops.latent_attention(case.q, case.q_rope, case.latents, case.ropes, case.up, plan, SCALE)
    near(found, case.expected(), BF16)


@pytest.mark.skipif(HAS_GPU, reason="the double is the cpu's")
def test_what_cudnn_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such shapes are gathered, with a line in the log for each; so are pages of 8 bits."""
    cudnn_double.install(monkeypatch)
    monkeypatch.setattr(cudnn_double.pygraph, "refuses", staticmethod(lambda dim, dim_v: True))
    ops = ops_of("cudnn", "triton", BF16)
    for _ in range(2):
        check(ops, MIXED, 3, Scores(0.25), dim=64)
    latents_near("triton")
    monkeypatch.setattr(cudnn_double.pygraph, "refuses", staticmethod(lambda dim, dim_v: False))
    check(ops, [(3, 5)], 0, Scores(0.25), dim=64, kv_dtype=torch.float8_e4m3fn)
    assert not cudnn_double.pygraph.built


@pytest.mark.parametrize(
    ("version", "dtype", "reason"),
    [
        (None, BF16, "nvidia-cudnn-frontend is not installed .*pip install nvidia-cudnn-frontend"),
        (91001, BF16, r"needs cuDNN 9\.10\.2, and this is 9\.10\.1; install a newer nvidia-cudnn"),
        (92000, torch.float32, "bfloat16 and float16"),
    ],
)
def test_the_log_says_why_keys_are_gathered(
    version: int | None, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []

    class Log:
        def warning(self, text: str, *, reason: str) -> None:
            reasons.append(reason)

    monkeypatch.setattr("runtime.devices.cuda.cudnn_pages.log.get", lambda name: Log())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if version is None:
        monkeypatch.setitem(sys.modules, "cudnn", None)
    else:
        cudnn_double.install(monkeypatch, version)
    assert open_paged_sdpa(dtype) is None
    (found,) = reasons
    assert re.search(reason, found), found
