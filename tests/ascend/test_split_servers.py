"""The published profile of DeepSeek-R1 as a split server: one server computes prompts, the other one answers,
on two ranks each in place of 16 and 32 dies, with a small model of the same structure."""

from pathlib import Path
from typing import Any

import pytest

from runtime.options.profile import read_profile
from tests.ascend.test_deployments import LATENT, scaled
from tests.ascend.test_serve import OPTIONS
from tests.e2e.disaggregated import COUNT, KEY, both, counts, key_options, server
from tests.models.make import make_checkpoint
from tests.models.make_next_token import add_next_token_layers
from tests.models.reference import Reference

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.lenient,
    pytest.mark.anyio,
    pytest.mark.usefixtures("forked_children"),
]

PROMPT = [i * 37 % 250 for i in range(300)]  # two full pages and 44 tokens
HALVES = {"prefill": "ascend-a3-deepseek-r1-prefill", "decode": "ascend-a3-deepseek-r1-decode"}


def half(mode: str, folder: Path) -> dict[str, Any]:
    """Options of a half, as its profile has them but for sizes."""
    keys = {name: value for name, value in key_options(folder, KEY).items() if name.startswith("disagg")}
    return scaled(read_profile(HALVES[mode])) | keys | {"profile": HALVES[mode]}


async def test_pages_of_prompts_reach_the_server_that_answers(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path / "model", **LATENT)
    expected = Reference(folder).greedy(PROMPT, COUNT)
    add_next_token_layers(folder)
    async with (
        server("prefill", folder, **half("prefill", tmp_path)) as prefill,
        server("decode", folder, **half("decode", tmp_path)) as (engine, decode),
    ):
        tokens, cached = await both(prefill, decode, PROMPT)
        assert tokens == expected
        assert cached == 256, "both full pages came"
        assert counts(engine).pages == 2


@pytest.mark.full
async def test_pages_of_another_form_are_not_taken(tmp_path: Path) -> None:
    """The decode half computes the prompt where the other one does not keep latents in NZ."""
    folder = make_checkpoint("deepseek_v3", tmp_path / "model", **LATENT)
    expected = Reference(folder).greedy(PROMPT, COUNT)
    one = OPTIONS | key_options(tmp_path, KEY) | {"page_size": 128, "disable_cuda_graph": True}
    async with (
        server("prefill", folder, **one) as prefill,
        server("decode", folder, **one, npu_nz_cache=True) as (engine, decode),
    ):
        tokens, cached = await both(prefill, decode, PROMPT)
        assert (tokens, cached) == (expected, 0)
        assert (counts(engine).pages, counts(engine).failures) == (0, 1)
