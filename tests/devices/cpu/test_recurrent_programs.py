"""Models with recurrent layers whose steps the kernels compute in one call. tests/models/test_hybrid.py holds
the same models against transformers in more ways; here no layer of theirs may be computed by itself."""

from typing import NoReturn

import pytest

from runtime.devices.cpu.kernels.levels import supported_levels
from runtime.models.decoder_specs import decoder_spec
from runtime.models.hybrid import HybridDecoder
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.drive import Planner, sampling, start
from tests.models.compare import Checkpoints, in_company, maker, open_checkpoints, random_prompts
from tests.models.make import make_checkpoint

BUILT = [level for level in supported_levels() if level.path.is_file()]
NUM_TOKENS = 12
CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{family: (family, {}) for family in ("bamba", "falcon_h1", "lfm2", "mamba2", "qwen3_next")},
    "granite_hybrid": ("granite_hybrid", {}),  # factors on residuals, with experts
    "lfm2_moe": ("lfm2_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "mamba2 one group, biases": ("mamba2", {"n_groups": 1, "use_bias": True, "conv_kernel": 2}),
    "falcon_h1 norm behind the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
    ),
}
pytestmark = pytest.mark.skipif(not BUILT, reason="no kernels are built")


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a step was computed layer by layer")


def prompts() -> list[list[int]]:
    """One of them is longer than a block of the recurrences."""
    return random_prompts(1, 9, 70, 41)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, maker(CASES), prompts(), NUM_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_call(case: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are those of transformers, in steps that mix rows that decode and rows that extend."""
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder, num_states=12, num_threads=2)
    monkeypatch.setattr(HybridDecoder, "piecewise", refuse)
    assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=33) == expected


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h", "olmo_hybrid"])
def test_what_is_computed_layer_by_layer(family: str, checkpoints: Checkpoints, tmp_path: object) -> None:
    """Families with a mixer, or a feed-forward, that programs do not have."""
    folder = make_checkpoint(family, str(tmp_path))
    executor, _ = start(folder, num_states=12)
    assert isinstance(executor, TorchExecutor)
    assert decoder_spec(executor.runner.model) is None


@pytest.mark.parametrize("case", ["falcon_h1", "lfm2", "qwen3_next"])
def test_bits_do_not_depend_on_company(case: str, checkpoints: Checkpoints) -> None:
    """Log probabilities of a sequence that decodes alone, and beside others, in bfloat16."""
    found = []
    for others in (0, 3):
        executor, ready = start(checkpoints(case).folder, num_states=12, num_threads=2, dtype="bfloat16")
        planner = Planner(executor, ready, 4)
        rows = [
            planner.row(slot, prompts()[3 - slot], sampling(top_logprobs=20)) for slot in range(1 + others)
        ]
        planner.run([], [(row, row.prompt_len) for row in rows])
        for _ in range(4):
            planner.run(rows, [])
        found.append(rows[0].results)
    assert found[0] == found[1]
