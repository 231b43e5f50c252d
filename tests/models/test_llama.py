"""Every family against transformers, greedy, token for token, whatever the chunks, pages, company and shared
prefixes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cpu.self_check import load_library
from tests.devices.drive import Planner, sampling, start
from tests.models.compare import Checkpoints, in_company, maker, open_checkpoints, random_prompts
from tests.models.dense import DENSE, DENSE_CASES
from tests.models.gpts import GPT_CASES, GPTS
from tests.models.make import LONGROPE, make_checkpoint
from tests.models.newer import NEWER
from tests.models.reference import Reference

ROPE = {"rope_theta": 10000.0}
DEEPSEEK_YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "gemma2 biases, no caps, own layers": (
        "gemma2",
        {
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "llama": ("llama", {}),
    "llama biases, one kv head": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama head_dim, tied": ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    "llama sharded": ("llama", {"shard_size": "60KB"}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", {}),
    "mixtral stacked, window": ("mixtral", {"stacked": True, "sliding_window": 7}),
    **{name: (name, {}) for name in ("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo")},
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe no norms, stacked": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": True, "stacked": True},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "granite_moe": ("granite_moe", {}),
    "granite_moe_shared": ("granite_moe_shared", {}),
    "hunyuan_moe": ("hunyuan_moe", {}),
    "hunyuan_moe alpha": (
        "hunyuan_moe",
        {"rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}},
    ),
    "llama4": ("llama4", {}),
    "llama4 no norms, all experts, wide chunks": (
        "llama4",
        {
            "use_qk_norm": False,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0, 1],
            "num_hidden_layers": 3,
            "attn_temperature_tuning": False,
        },
    ),
    "minimax_m2": ("minimax_m2", {}),
    "olmoe": ("olmoe", {}),
    "phimoe": ("phimoe", {}),
    "phimoe stacked, jitter, longrope": (
        "phimoe",
        {
            "stacked": True,
            "router_jitter_noise": 0.4,
            "max_position_embeddings": 256,
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [1.0 + i / 8 for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window above layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2 layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, some layers dense": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, first layer dense, unnormalised": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "qwen3_moe stacked, window": (
        "qwen3_moe",
        {"stacked": True, "use_sliding_window": True, "sliding_window": 7},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_shared_experts": 1, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "kv_lora_rank": 8},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 yarn, stacked, biases": (
        "deepseek_v3",
        {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0}, "stacked": True, "attention_bias": True},
    ),
    "deepseek_v3 as Kimi K2": (
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "num_nextn_predict_layers": 0,
            "rope_parameters": DEEPSEEK_YARN
            | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1},
        },
    ),
    "deepseek_v3 wide values, halves": (
        "deepseek_v3",
        {"v_head_dim": 40, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v32 yarn, wide index": (
        "deepseek_v32",
        {"rope_parameters": DEEPSEEK_YARN, "index_head_dim": 24, "index_topk": 20, "mlp_layer_types": None},
    ),
    "linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 48, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "yarn": (
        "qwen2",
        {
            "max_position_embeddings": 32,
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "yarn tuned": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "phi3 long": (
        "phi3",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1, "attention_factor": 1.2}},
    ),
    **{
        family: (family, {})
        for family in (
            "arcee",
            "cohere",
            "cohere2",
            "ernie4_5",
            "exaone4",
            "gemma",
            "gemma3",
            "glm",
            "glm4",
            "glm_moe_dsa",
            "granite",
            "hunyuan",
            "mellum",
            "minicpm3",
            "mistral4",
            "olmo2",
            "olmo3",
            "phi3",
            "seed_oss",
            "smollm3",
            "solar_open",
            "starcoder2",
            "step3",
        )
    },
    **DENSE_CASES,
    **GPT_CASES,
    **{name: (name, {}) for name in NEWER},
}
# families that the CPU computes layer by layer, with what programs lack
BY_LAYERS = {
    *GPTS,
    *NEWER.keys() - {"hy3"},
    *DENSE.keys() - {"cwm", "ministral", "youtu", "helium", "vaultgemma"},
    "arcee",
    "cohere",
    "cohere2",
    "deepseek_v32",
    "glm_moe_dsa",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma3",
    "granite",
    "granite_moe",
    "granite_moe_shared",
    "hunyuan",
    "hunyuan_moe",
    "minicpm3",
    "llama4",
    "minimax_m2",
    "mistral4",
    "olmo2",
    "olmo3",
    "olmoe",
    "phimoe",
    "smollm3",
    "starcoder2",
    "step3",
}
NUM_TOKENS = 24


def prompts() -> list[list[int]]:
    return random_prompts(1, 9, 30, 41)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, maker(CASES), prompts(), NUM_TOKENS)


@pytest.mark.sampled(120)
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 1000), (1, 7), (16, 13)])
@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_in_company(
    case: str, page_size: int, chunk: int, checkpoints: Checkpoints
) -> None:
    """Sequences join while others decode: every step but the first mixes decode and extend rows."""
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder, page_size=page_size)
    planner = Planner(executor, ready, page_size)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk) == expected
    is_program = executor.runner.forward.program is not None  # type: ignore[attr-defined]
    has_spec = CASES[case][0] not in BY_LAYERS  # else the kernels compute whole steps
    assert is_program == (has_spec and load_library() is not None)


@pytest.mark.parametrize(
    "case",
    ["llama", "mistral window", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "llama4"],
)
def test_several_extend_rows_in_one_step(case: str, checkpoints: Checkpoints) -> None:
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts())]
    planner.run([], [(row, row.prompt_len) for row in rows])
    for _ in range(NUM_TOKENS - 1):
        planner.run(rows, [])
    assert [row.tokens[row.prompt_len :] for row in rows] == expected


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "mistral window",
        "qwen2 tied",
        "dynamic",
        "qwen2_moe",
        "deepseek_v3",
        "deepseek_v32",
        "llama4",
    ],
)
def test_shared_prefix_pages(case: str, checkpoints: Checkpoints) -> None:
    """A second sequence reads the pages that the first one wrote, while the first goes on."""
    folder, reference, expected = checkpoints(case)
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    first = planner.row(0, prompts()[3], sampling())
    planner.prefill(first)
    other = prompts()[3][:20] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=20)
    planner.run([first], [(second, len(other) - 20)])
    while len(first.tokens) < first.prompt_len + NUM_TOKENS:
        planner.run([first, second], [])
    assert first.tokens[first.prompt_len :] == expected[3]
    assert second.tokens[len(other) :] == reference.greedy(other, len(second.tokens) - len(other))


@pytest.mark.parametrize("case", CASES)
def test_logprobs_agree(case: str, checkpoints: Checkpoints) -> None:
    """Of the prompt and of the output, with alternatives, to 1e-4."""
    folder, reference, expected = checkpoints(case)
    prompt = prompts()[2]
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(3, prompt, sampling(top_logprobs=3, prompt_logprobs=2))
    company = planner.row(1, prompts()[1], sampling())
    planner.prefill(company)
    planner.prefill(row, chunk=11)
    while len(row.tokens) < len(prompt) + NUM_TOKENS:
        planner.run([company, row], [])
    assert row.tokens[len(prompt) :] == expected[2]
    # past its own length, the reference with dynamic rope turns a whole prompt otherwise than the same tokens
    # decoded; only what is
    # shorter than that brings it back to where it began
    wanted = reference.logprobs(row.tokens[:47] if case == "dynamic" else row.tokens[:-1])
    for i, (token, logprob, top_ids, top) in enumerate(row.results[: len(wanted) - len(prompt) + 1]):
        line = wanted[len(prompt) - 1 + i]
        assert token == row.tokens[len(prompt) + i]
        assert logprob == pytest.approx(float(line[token]), abs=1e-4)
        values, ids = line.topk(3)
        assert top == pytest.approx(values.tolist(), abs=1e-4) and top_ids == ids.tolist()
    logprobs = np.concatenate([part.logprobs for part in row.prompt])
    tops = np.concatenate([part.top_logprobs for part in row.prompt]).reshape(-1, 2)
    assert np.isnan(logprobs[-1]) and len(logprobs) == len(prompt)
    np.testing.assert_allclose(
        logprobs[:-1], [float(wanted[i, token]) for i, token in enumerate(prompt[1:])], atol=1e-4
    )
    np.testing.assert_allclose(tops, wanted[: len(prompt)].topk(2).values.numpy(), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_half_precision_is_near(family: str, dtype: str, tmp_path: Path) -> None:
    """The same weights in 16 bits: prompt log probabilities stay close to fp32's."""
    folder = make_checkpoint(family, tmp_path, dtype=dtype, tie_word_embeddings=family == "qwen3")
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompts()[3], sampling(prompt_logprobs=0))
    planner.prefill(row, chunk=17)
    planner.run([row], [])
    found = np.concatenate([part.logprobs for part in row.prompt])[:-1]
    wanted = Reference(folder).logprobs(prompts()[3])
    expected = wanted[torch.arange(len(found)), torch.tensor(prompts()[3][1:])].numpy()
    assert np.abs(found - expected).mean() < 0.02 * np.abs(expected).mean()
