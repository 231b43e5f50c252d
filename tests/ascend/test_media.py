"""Qwen3-VL on NPUs: images and videos, dense and with experts, against transformers; greedy tokens in
float32. That its encoder's attention is the fused operator is in test_towers.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.options.profile import read_profile
from tests.ascend.test_deployments import scaled
from tests.e2e.image_engine import COUNT, Images
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, picture
from tests.models.make_qwen3_vl import greedy_qwen3_vl, make_qwen3_vl

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.lenient,
    pytest.mark.anyio,
    pytest.mark.usefixtures("forked_children"),
]

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B, SMALL = picture(1, 40, 60), picture(2, 90, 30), picture(3, 7, 9)
FILM = np.random.default_rng(4).integers(0, 256, (6, 32, 40, 3), dtype=np.uint8)
# prompts with one placeholder a file, and the files
PROMPTS: dict[str, tuple[list[int], list[np.ndarray]]] = {
    "one image": ([*TEXT, PLACEHOLDER, *MORE], [A]),
    "three images": ([PLACEHOLDER, *TEXT, PLACEHOLDER, *MORE, PLACEHOLDER, *TEXT], [A, B, SMALL]),
    "one video": ([*TEXT, VIDEO_PLACEHOLDER, *MORE], [FILM]),
    "text alone": ([*TEXT, *MORE], []),
}
PROFILE = "ascend-a3-qwen3-vl-8b"
SERVED: dict[str, Any] = scaled(read_profile(PROFILE)) | {"profile": PROFILE, "max_running_requests": 4}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {"tensor_parallel_size": 1, "chunked_prefill_size": 20}),
        ("moe", {"expert_parallel_size": 2, "mm_enable_dp_encoder": True}),
    ],
    ids=["chunks", "experts, and two ranks that share the encoding"],
)
async def test_tokens_equal_transformers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_qwen3_vl(tmp_path, kind)
    expected = {name: greedy_qwen3_vl(tmp_path, model, *prompt, COUNT)[0] for name, prompt in PROMPTS.items()}
    other = greedy_qwen3_vl(tmp_path, model, PROMPTS["one image"][0], [B], COUNT)[0]
    assert other != expected["one image"], "images matter"
    async with runtime.Engine(model_path=str(tmp_path), **SERVED | options) as engine:
        files = Images(engine)
        assert {name: (await files.ask(*prompt)).token_ids for name, prompt in PROMPTS.items()} == expected
        assert await files.ask_all(PROMPTS) == expected
        assert files.encodings.num_encoded == 4, "each file is encoded once"
