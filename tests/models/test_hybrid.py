"""Families with recurrent layers against transformers, greedy, token for token: in company, in chunks that
end anywhere, from kept states, with forced drafts, and through graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.devices.cpu.kernels import choice
from runtime.ranks.open_executor import DEVICES
from runtime.scheduling.drafts import Draft
from tests.devices import taped
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.compare import Checkpoints, expected_of, in_company, maker, open_checkpoints, random_prompts
from tests.models.hybrids import HYBRIDS
from tests.models.make import VOCAB_SIZE, make_checkpoint

NUM_TOKENS = 16
# what differs from the sizes of make.py
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HYBRIDS},
    "mamba2 one group, biases, limits": (
        "mamba2",
        {"n_groups": 1, "use_bias": True, "conv_kernel": 2, "tie_word_embeddings": True},
    ),
    "mamba biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5}),
    "falcon_h1 norm behind the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
    ),
    "falcon_h1 norm before the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True},
    ),
    "granite_hybrid dense, with positions": (
        "granite_hybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "jamba dense": ("jamba", {"num_experts": 1, "mamba_proj_bias": True}),
    "nemotron_h stacked, without a latent": ("nemotron_h", {"moe_latent_size": None, "stacked": True}),
    "nemotron_h dense, biases": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mlp_bias": True, "use_bias": True},
    ),
    "kimi_linear stacked, query latent": (
        "kimi_linear",
        {"q_lora_rank": 24, "routed_scaling_factor": 1.5, "stacked": True},
    ),
    "zamba2 one block, no positions": (
        "zamba2",
        {
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_key_value_heads": 2,
        },
    ),
    "olmo_hybrid rotated, rates up to 1": (
        "olmo_hybrid",
        {
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


# families that have each kind of mixer, of attention and of feed-forward
MIXERS = ("jamba", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_moe")
VARIANTS = ("granite_hybrid dense, with positions", "kimi_linear stacked, query latent", "mamba biases")


def often(case: str, is_often: bool) -> Any:
    """A case of every run, or of full ones alone."""
    return case if is_often else pytest.param(case, marks=pytest.mark.full)


def prompts() -> list[list[int]]:
    """One of them is longer than a chunk of the scan."""
    return random_prompts(1, 9, 70, 41)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, maker(CASES), prompts(), NUM_TOKENS)


def test_torch_in_place_of_kernels(checkpoints: Checkpoints) -> None:
    """--mamba-backend torch_native: layers open no kernel, and tokens are the same."""
    folder, _, expected = checkpoints("bamba")
    executor, ready = start(folder, num_states=12, recurrent_backend="torch_native")
    layers: Any = executor.runner.model.layers  # type: ignore[attr-defined]
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    assert mixers and all(mixer.kernel is None for mixer in mixers)
    assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=1000) == expected


@pytest.mark.parametrize("level", ["", "none"], ids=["kernels", "torch"])
@pytest.mark.parametrize("case", [often(case, case in (*HYBRIDS, *VARIANTS)) for case in CASES])
def test_greedy_equals_transformers_in_company(
    case: str, level: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice on one rank: slots and states that others had are taken anew."""
    monkeypatch.setenv(choice.VARIABLE, level)
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder, num_states=12)
    assert ready.num_state_slots == 13
    for chunk in (1000, 7):
        assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk) == expected


@pytest.mark.parametrize("family", [often(family, family in MIXERS) for family in HYBRIDS])
def test_captured_decode_steps(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through graphs with padding, next to steps that no graph has."""
    monkeypatch.setitem(DEVICES, "taped", taped.__name__)
    folder, _, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12, device="taped", graph_sizes=[2, 4], max_len=128)
    assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=13) == expected
    assert executor.tapes.replays > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", [often(family, family in MIXERS) for family in HYBRIDS])
def test_prefix_at_a_kept_state(family: str, checkpoints: Checkpoints) -> None:
    """A sequence continues from a state that a step has kept, while the first one goes on."""
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12)
    planner = Planner(executor, ready, 4)
    first = planner.row(0, prompts()[3], sampling())
    planner.keeps = [(1, 9, -1)]  # the state of slot 0, behind its first 20 tokens
    planner.run([], [(first, 20)])
    planner.run([], [(first, first.prompt_len - 20)])
    other = prompts()[3][:20] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=20, state_from=9)
    planner.run([first], [(second, len(other) - 20)])
    while len(first.tokens) < first.prompt_len + NUM_TOKENS:
        planner.run([first, second], [])
    assert first.tokens[first.prompt_len :] == expected[3]
    assert second.tokens[len(other) :] == reference.greedy(other, len(second.tokens) - len(other))


@pytest.mark.parametrize("family", [often(family, family in MIXERS) for family in HYBRIDS])
def test_forced_drafts(family: str, checkpoints: Checkpoints) -> None:
    """Tokens that a grammar forces are computed as one row, next to rows that decode and extend."""
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12)
    planner = Planner(executor, ready, 4)
    rows: list[Row] = [planner.row(slot, prompts()[slot], sampling()) for slot in (1, 3)]
    for row in rows:
        planner.prefill(row)
    forced = [11, 12, 13, 14, 15]
    late = planner.row(0, prompts()[2], sampling())
    planner.run([rows[0]], [(late, 33)], [(rows[1], Draft(forced, is_sure=True))])
    planner.run([rows[0], rows[1]], [(late, late.prompt_len - 33)])
    while len(rows[0].tokens) < rows[0].prompt_len + NUM_TOKENS:
        planner.run([*rows, late], [])
    known = [*prompts()[3], expected[3][0], *forced]
    assert rows[0].tokens[rows[0].prompt_len :] == expected[1]
    assert rows[1].tokens == known + reference.greedy(known, len(rows[1].tokens) - len(known))
    assert late.tokens[late.prompt_len :] == expected[2][: len(late.tokens) - late.prompt_len]


@pytest.mark.parametrize("level", ["", "none"], ids=["kernels", "torch"])
@pytest.mark.parametrize("family", [often(family, family in MIXERS) for family in HYBRIDS])
def test_drafts_that_may_be_refused(
    family: str, level: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of drafts, of which all, some or none are right, next to rows that decode, extend and compute
    forced tokens: the state goes on behind what was accepted."""
    monkeypatch.setenv(choice.VARIABLE, level)
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12)
    planner = Planner(executor, ready, 4)
    rows = [planner.row(slot, prompts()[slot], sampling()) for slot in (1, 3)]
    for row in rows:
        planner.prefill(row)
    late, forced = planner.row(0, prompts()[2], sampling()), planner.row(2, prompts()[0], sampling())
    planner.prefill(forced)
    planner.run([], [(late, 33)])
    steps = 0
    for num_right, num_wrong in [(0, 3), (2, 1), (3, 0), (1, 2), (0, 1), (1, 0)] * 4:
        verifies = []
        for row, answer in zip(rows, (expected[1], expected[3]), strict=True):
            at = len(row.tokens) - row.prompt_len
            if (room := NUM_TOKENS - at) > 0:
                right = answer[at : at + min(num_right, room)]
                wrong = [(token + 1) % VOCAB_SIZE for token in answer[at + len(right) :][:num_wrong]]
                if right + wrong:
                    verifies.append((row, Draft(right + wrong)))
        if len(verifies) == 2 and not steps:
            verifies.insert(1, (forced, Draft([11, 12, 13], is_sure=True)))
        if not verifies:
            break
        steps += 1
        planner.run([late] if steps > 1 else [], [(late, 37)] if steps == 1 else [], verifies)
    assert steps < NUM_TOKENS
    for row, answer in zip(rows, (expected[1], expected[3]), strict=True):
        assert row.tokens[row.prompt_len :][:NUM_TOKENS] == answer
    assert late.tokens[late.prompt_len :] == expected[2][: len(late.tokens) - late.prompt_len]
    known = [*prompts()[0], expected[0][0], 11, 12, 13]
    assert forced.tokens == known + reference.greedy(known, 1)


@pytest.mark.parametrize("level", ["", "none"], ids=["kernels", "torch"])
@pytest.mark.parametrize("family", [often(family, family in MIXERS) for family in HYBRIDS])
def test_a_state_that_drafts_pass_is_kept(
    family: str, level: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that gets to the length keeps the state there, also amid its tokens; one that does not leaves
    what was kept before."""
    monkeypatch.setenv(choice.VARIABLE, level)
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12, page_size=1)
    planner = Planner(executor, ready, 1)
    row, answer = planner.row(0, prompts()[1], sampling()), expected[1]
    planner.prefill(row)  # 9 tokens
    planner.keeps = [(1, 9, 11)]
    planner.run([], [], [(row, Draft([*answer[1:4], answer[4] + 1]))])
    assert row.computed == 13
    planner.keeps = [(1, 9, 15)]
    planner.run([], [], [(row, Draft([answer[5] + 1, 3, 4]))])
    assert row.computed == 14
    other = [*row.tokens[:11], 5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=row, shared=11, state_from=9)
    planner.run([], [(second, 3)])
    for _ in range(6):
        planner.run([row, second], [])
    assert row.tokens[9:] == answer[: len(row.tokens) - 9]
    assert second.tokens[14:] == reference.greedy(other, 7)


@pytest.mark.parametrize("level", ["", "none"], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_of_16_bits(dtype: str, level: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """--mamba-ssm-dtype: log probabilities move by no more than its rounding makes of them."""
    monkeypatch.setenv(choice.VARIABLE, level)
    folder, _, _ = checkpoints("bamba")
    found = []
    for state_dtype in ("float32", dtype):
        executor, ready = start(folder, num_states=12, state_dtype=state_dtype)
        planner = Planner(executor, ready, 4)
        row = planner.row(0, prompts()[3], sampling(top_logprobs=4, prompt_logprobs=0))
        planner.prefill(row, 13)
        found.append(np.concatenate([part.logprobs for part in row.prompt]))
    difference = np.nanmax(np.abs(found[0] - found[1]))
    assert 0 < difference < 0.05


def test_a_hybrid_family_with_attention_alone(tmp_path: Path) -> None:
    """Small models of Granite 4: there are no states, so none bounds the sequences."""
    own = {"num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["attention"] * 3}
    folder = make_checkpoint("granite_hybrid", tmp_path, **own)
    expected = expected_of(folder, prompts(), NUM_TOKENS)
    executor, ready = start(folder)
    assert ready.num_state_slots == 0
    assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=7) == expected.tokens
