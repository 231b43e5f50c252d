"""Qwen3-VL on an NPU: images and videos beside text, with decode steps that are replayed. Tokens are
transformers'."""

from pathlib import Path

import anyio
import pytest

from runtime import Engine
from tests.ascend.test_serve import OPTIONS
from tests.e2e.image_engine import COUNT, Images
from tests.e2e.test_deepstack import PROMPTS
from tests.metrics.read import sample
from tests.models.make_qwen3_vl import greedy_qwen3_vl, make_qwen3_vl

pytestmark = [pytest.mark.ascend, pytest.mark.anyio, pytest.mark.usefixtures("forked_children")]

NAMES = ("three images", "one video", "text alone")


async def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_qwen3_vl(tmp_path, "dense")
    expected = {name: greedy_qwen3_vl(tmp_path, model, *PROMPTS[name], COUNT)[0] for name in NAMES}
    options = OPTIONS | {"chunked_prefill_size": 20, "cuda_graph_bs": (2, 4), "max_running_requests": 4}
    async with Engine(model_path=str(tmp_path), **options) as engine:
        with anyio.fail_after(120):
            while sample(engine.metrics(), "runtime_captured_sizes") < 2:
                await anyio.sleep(0.05)
        files = Images(engine)
        assert await files.ask_all({name: PROMPTS[name] for name in NAMES}) == expected
