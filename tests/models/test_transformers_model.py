"""Models that transformers' own code computes over our pages, against transformers with its own cache:
greedy, token for token, in company, chunked, on a shared prefix, and after a preemption."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from runtime.ranks.open_executor import DEVICES
from tests.devices import taped
from tests.devices.drive import Planner, page_copies, sampling, start
from tests.models.compare import Checkpoints, finish, in_company, open_checkpoints, random_prompts
from tests.models.make import EXPERTS, SIZES, VOCAB_SIZE, make_checkpoint, make_model, write_tokenizer

MULTI_HEAD = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
OLD = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
XGLM = {"vocab_size": VOCAB_SIZE, "d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}
ENDS = {"bos_token_id": 256, "eos_token_id": 258}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", SIZES),
    "arcee": ("ArceeConfig", SIZES),
    "biogpt": ("BioGptConfig", MULTI_HEAD),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 24, "sliding_window": 7, "num_hidden_layers": 3}),
    "gpt2": ("GPT2Config", OLD | ENDS),
    "gpt2 layer scales": ("GPT2Config", OLD | ENDS | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", OLD | ENDS),
    "gpt_neox": ("GPTNeoXConfig", MULTI_HEAD),
    "gpt_oss": (
        "GptOssConfig",
        SIZES | {"head_dim": 16, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "helium": ("HeliumConfig", SIZES | {"head_dim": 16}),
    "nemotron": ("NemotronConfig", SIZES),
    "olmo": ("OlmoConfig", SIZES),
    "opt": (
        "OPTConfig",
        MULTI_HEAD | {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    ),
    "opt narrow": ("OPTConfig", MULTI_HEAD | {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "persimmon": ("PersimmonConfig", MULTI_HEAD),
    "phi": ("PhiConfig", SIZES),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "stablelm": ("StableLmConfig", SIZES | {"use_qkv_bias": True}),
}
NUM_TOKENS = 16
STACKED = "model.layers.1.mlp.experts.gate_up_proj"


def prompts() -> list[list[int]]:
    return random_prompts(1, 9, 41)


def make(case: str, folder: Path) -> Path:
    kind, fields = CASES[case]
    make_model(getattr(transformers, kind)(**fields), 0).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, make, prompts(), NUM_TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_in_company(case: str, checkpoints: Checkpoints) -> None:
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder, model_impl="transformers")
    planner = Planner(executor, ready, 4)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk=7) == expected


def test_experts_in_one_tensor_or_one_by_one(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A checkpoint with one tensor of all experts of a layer has the tokens of one with a tensor for each."""
    folder, reference, expected = checkpoints("qwen3_moe")
    assert STACKED not in load_file(folder / "model.safetensors")
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    stacked = load_file(tmp_path / "model.safetensors")
    assert STACKED in stacked
    executor, ready = start(tmp_path, model_impl="transformers")
    assert in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=7) == expected
    stacked[STACKED] = stacked[STACKED][1:]
    save_file(stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 2 weights .*experts\.gate_up_proj"):
        start(tmp_path, model_impl="transformers")


@pytest.mark.parametrize("case", ["gpt2", "gpt_oss"])
def test_shared_prefix_pages(case: str, checkpoints: Checkpoints) -> None:
    """A second sequence reads the pages that the first one wrote, while the first goes on; then the second is
    preempted, and computed again from what it has."""
    folder, reference, expected = checkpoints(case)
    executor, ready = start(folder, model_impl="transformers")
    planner = Planner(executor, ready, 4)
    first = planner.row(0, prompts()[2], sampling())
    planner.prefill(first)
    other = prompts()[2][:20] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=20)
    planner.run([first], [(second, len(other) - 20)])
    for _ in range(4):
        planner.run([first, second], [])
    again = planner.row(2, second.tokens, sampling(), prefix=first, shared=20)
    finish(planner, [again], [first], NUM_TOKENS, chunk=3)
    assert first.tokens[first.prompt_len :] == expected[2]
    assert again.tokens[len(other) :] == reference.greedy(other, len(again.tokens) - len(other))


@pytest.mark.parametrize("case", ["gpt2", "gpt_oss", "gemma2"])
def test_captured_decode_steps(case: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' code in graphs, with padding, next to steps that no graph has."""
    monkeypatch.setitem(DEVICES, "taped", taped.__name__)
    folder, _, expected = checkpoints(case)
    options = {"device": "taped", "graph_sizes": [2, 4], "max_len": 128}
    executor, ready = start(folder, model_impl="transformers", **options)
    found = in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=13, pause=2)
    assert found == expected
    assert executor.tapes.replays > 20  # type: ignore[attr-defined]


def test_pages_in_host_memory(checkpoints: Checkpoints) -> None:
    """A prefix goes to host memory and comes back as other pages."""
    folder, _, expected = checkpoints("gpt2")
    fd = os.memfd_create("host tier")
    options = {"host_ratio": 1.0, "host_fds": [fd], "max_total_tokens": 128}
    executor, ready = start(folder, model_impl="transformers", **options)
    planner = Planner(executor, ready, 4)
    first = planner.row(0, prompts()[2], sampling())
    planner.prefill(first)
    hosts = [9, 2, 31, 4, 17]
    planner.page_copies = page_copies(saves=dict(zip(first.pages[:5], hosts, strict=True)))
    planner.run([], [])
    second = planner.row(1, prompts()[2], sampling())
    second.pages, second.computed = [planner.free.pop() for _ in hosts], 20
    planner.page_copies = page_copies(loads=dict(zip(hosts, second.pages, strict=True)))
    assert planner.generate(second, NUM_TOKENS) == expected[2]
    executor.close()
    os.close(fd)


@pytest.mark.parametrize("case", ["gemma2", "gpt_neox"])
def test_logprobs_agree(case: str, checkpoints: Checkpoints) -> None:
    """Caps of logits and other ends of a model are transformers' own."""
    folder, reference, _ = checkpoints(case)
    executor, ready = start(folder, model_impl="transformers")
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompts()[2], sampling(prompt_logprobs=0))
    planner.prefill(row, chunk=11)
    found = np.concatenate([part.logprobs for part in row.prompt])[:-1]
    wanted = reference.logprobs(row.tokens[:-1])
    expected = [float(wanted[i, token]) for i, token in enumerate(prompts()[2][1:])]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_pages_of_eight_bits(checkpoints: Checkpoints) -> None:
    folder, reference, expected = checkpoints("gpt2")
    executor, ready = start(folder, model_impl="transformers", kv_dtype="fp8_e4m3")
    wide = start(folder, model_impl="transformers")[1]
    assert ready.pages_bytes / ready.num_pages * 4 == wide.pages_bytes / wide.num_pages
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompts()[2], sampling(prompt_logprobs=0))
    planner.prefill(row)
    found = np.concatenate([part.logprobs for part in row.prompt])[:-1]
    wanted = reference.logprobs(prompts()[2])
    exact = np.array([float(wanted[i, token]) for i, token in enumerate(prompts()[2][1:])])
    assert 0 < np.abs(found - exact).mean() < 0.05 * np.abs(exact).mean()


def test_auto_takes_the_models_own_code_first(tmp_path: Path, checkpoints: Checkpoints) -> None:
    assert read_config(make_checkpoint("llama", tmp_path)).transformers_json is None
    folder, _, expected = checkpoints("biogpt")
    assert read_config(folder).transformers_json is not None
    with pytest.raises(ModelError, match="BioGptForCausalLM, which is not supported"):
        read_config(folder, model_impl="runtime")
    with pytest.raises(ModelError, match="--is-embedding"):
        read_config(folder, is_embedding=True)


def test_random_weights(checkpoints: Checkpoints) -> None:
    executor, ready = start(checkpoints("gpt_neox")[0], model_impl="transformers", load_format="dummy")
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompts()[1], sampling())
    planner.prefill(row)
    assert 0 <= row.tokens[-1] < VOCAB_SIZE


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chunks of attention": ("ArceeConfig", SIZES | {"attention_chunk_size": 8}, "attention_chunk_size"),
    "no interface": ("XGLMConfig", XGLM, "interface"),
    "masks of its own": ("DogeConfig", SIZES, "masks of its own"),
    "states": ("RecurrentGemmaConfig", SIZES | {"lru_width": 64}, "layer_types|states|max_position"),
    "rotary by the longest": (
        "ArceeConfig",
        SIZES | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "rope type dynamic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    kind, fields, message = REFUSED[case]
    config = getattr(transformers, kind)(**fields)
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    written = config.to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match=message):
        start(tmp_path, model_impl="transformers", load_format="dummy")


@pytest.mark.parametrize("missing", ["n_layer", "n_positions"])
def test_a_missing_field_is_named(missing: str, tmp_path: Path) -> None:
    fields = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"} | OLD
    del fields[missing]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=f"has none of .*{missing}"):
        read_config(tmp_path, model_impl="transformers")
