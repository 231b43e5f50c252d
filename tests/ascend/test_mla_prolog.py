"""Fused preparation of latent attention and latents in NZ: tokens of transformers in fp32, whatever is fused;
what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.ascend import mla_prolog as prolog
from runtime.devices.ascend import mla_prolog_fused
from runtime.devices.ascend.mla_prolog import Limits
from runtime.errors import ModelError, StartError
from tests.ascend.test_exact import BRANCH, COUNT, LONG, PAGE, SHORT, open_rank
from tests.ascend.test_graphs import opened
from tests.ascend.test_quantised import SIZES
from tests.devices.drive import sampling, start
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.reference import Reference
from tests.models.test_quantised import log_probabilities

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

# multiples of the tiles of FRACTAL_NZ
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
}
ANY = Limits((torch.float32, torch.bfloat16), {})


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented sizes are those of full models, in 16 bits: the same ways with tiny ones in fp32."""
    for name in ("CACHE_LIMITS", "FUSED_LIMITS"):
        monkeypatch.setattr(prolog, name, ANY)


@pytest.mark.parametrize(
    ("family", "more", "options"),
    [
        ("deepseek_v2", {}, {"mla_prolog": True}),
        ("deepseek_v2", {"q_lora_rank": None}, {"nz_cache": True}),
        ("deepseek_v3", {}, {}),
        ("deepseek_v3", {}, {"mla_prolog": True, "nz_cache": True}),
        ("deepseek_v3", {"rope_interleave": False}, {"nz_cache": True}),
        ("deepseek_v3", {"rope_interleave": False}, {"mla_prolog": True}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("any_size")
def test_tokens_are_those_of_transformers(
    family: str, more: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of one token, of few and of many in a step; a prefix that is shared."""
    folder = make_checkpoint(family, tmp_path, **(LATENT | more))
    executor, planner = open_rank(folder, device_options=options)
    short, long = planner.row(2, SHORT, sampling()), planner.row(5, LONG, sampling())
    branch = planner.row(1, BRANCH, sampling(), prefix=long, shared=2 * PAGE)
    planner.run([], [(short, len(SHORT))])
    for count in (100, 1, 155, 44):
        planner.run([short], [(long, count)])
    branch.pages = long.pages[:2]
    planner.run([short, long], [(branch, 3)])
    while len(branch.tokens) < len(BRANCH) + COUNT:
        planner.run([short, branch, long], [])
    reference = Reference(folder)
    for row, prompt in ((short, SHORT), (long, LONG), (branch, BRANCH)):
        assert row.tokens[len(prompt) :][:COUNT] == reference.greedy(prompt, COUNT)
    executor.close()


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path, **LATENT)
    with pytest.raises(
        ModelError,
        match="--npu-mla-prolog does not take this model, which has float32, and not bfloat16 or float16",
    ):
        open_rank(folder, device_options={"mla_prolog": True})
    # a profile's option is dropped
    executor, planner = open_rank(folder, device_options={"mla_prolog": True, "requires_mla_prolog": False})
    row = planner.row(0, SHORT, sampling())
    planner.run([], [(row, len(SHORT))])
    while len(row.tokens) < len(SHORT) + COUNT:
        planner.run([row], [])
    assert row.tokens[len(SHORT) :][:COUNT] == Reference(folder).greedy(SHORT, COUNT)
    executor.close()


@pytest.mark.parametrize("is_nz", [False, True])
@pytest.mark.usefixtures("any_size")
def test_weights_in_int8(is_nz: bool, tmp_path: Path) -> None:
    """An input on the edge of two codes may be rounded either way."""
    sizes = SIZES["deepseek_v3"] | {"qk_rope_head_dim": 32}  # tiles of 32 columns
    quantise(make_checkpoint("deepseek_v3", tmp_path / "plain", **sizes), tmp_path, "modelslim W8A8_DYNAMIC")
    found = [
        log_probabilities(tmp_path / "quantised", dtype="float32", **options)
        for options in (
            {"device": "cpu"},
            {"device": "npu", "page_size": 128, "device_options": {"mla_prolog": True, "nz_cache": is_nz}},
        )
    ]
    torch.testing.assert_close(found[1][0], found[0][0], atol=5e-2, rtol=0)
    assert (found[1][0] - found[0][0]).abs().mean() < 5e-3 and found[0][1] == found[1][1]


@pytest.mark.usefixtures("any_size")
def test_other_schemes_are_refused(tmp_path: Path) -> None:
    quantise(
        make_checkpoint("deepseek_v3", tmp_path / "plain", **SIZES["deepseek_v3"]), tmp_path, "modelslim W8A8"
    )
    with pytest.raises(
        ModelError,
        match="attention weights quantised otherwise than to int8 with a scale for each token; leave it out",
    ):
        start(
            tmp_path / "quantised",
            device="npu",
            page_size=128,
            dtype="float32",
            device_options={"mla_prolog": True},
        )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("EZ9999: inner error\nand more"),
            "does not work on this NPU .EZ9999: inner error.; leave it out.*versions of CANN",
        ),
        (AttributeError("no such operator"), "does not work on this NPU .no such operator."),
    ],
)
@pytest.mark.usefixtures("any_size")
def test_an_npu_without_the_operator_is_reported_at_start(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(mla_prolog_fused.torch_npu, "npu_mla_prolog_v3", fails)
    with pytest.raises(StartError, match=words):
        open_rank(make_checkpoint("deepseek_v3", tmp_path, **LATENT), device_options={"mla_prolog": True})


@pytest.mark.usefixtures("any_size")
def test_an_npu_without_the_other_operator_goes_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(mla_prolog_fused.torch_npu, "npu_kv_rmsnorm_rope_cache", fails)
    folder = make_checkpoint("deepseek_v3", tmp_path, **LATENT)
    executor, planner = open_rank(folder)
    assert planner.generate(planner.row(0, SHORT, sampling()), COUNT) == Reference(folder).greedy(
        SHORT, COUNT
    )
    assert executor.runner.device.mla_prologs.refusals == ["no such kernel"]
    with pytest.raises(ModelError, match="to do with an NPU that lacks npu_kv_rmsnorm_rope_cache"):
        open_rank(folder, device_options={"mla_prolog": True})


@pytest.mark.parametrize("launches", ["at once", "late"], indirect=True)
@pytest.mark.usefixtures("any_size")
def test_captured_steps(launches: None, tmp_path: Path) -> None:
    """With all that there is: experts on two streams, and a step with a prompt in pieces, whose graphs know
    no attention plan."""
    folder = make_checkpoint("deepseek_v3", tmp_path, **LATENT)
    planner, executor = opened(
        folder,
        piecewise_sizes=[64],
        device_options={"mla_prolog": True, "nz_cache": True, "multi_stream": True},
    )
    assert executor.capture(64, "tokens").error == "" and executor.runner.piecewise.ready == [64]
    short, long = planner.row(2, SHORT, sampling()), planner.row(5, LONG[:252], sampling())
    planner.run([], [(short, len(SHORT))])
    planner.run([short], [(long, 252)])
    for _ in range(COUNT):
        planner.run([short, long], [])
    assert executor.runner.graphs.ready == [2, 4]
    reference = Reference(folder)
    for row, prompt in ((short, SHORT), (long, LONG[:252])):
        assert row.tokens[len(prompt) :] == reference.greedy(prompt, len(row.tokens) - len(prompt))
