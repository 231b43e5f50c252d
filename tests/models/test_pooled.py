"""Encoders, embedders and classifiers against transformers, fp32."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.make_pooled import DECODERS, ENCODERS, make_pooled, make_reward, write_tokenizer

PROMPTS = [
    [257, 5, 9, 100, 7, 31, 258],
    [257, 200, 258],
    [40 + i for i in range(60)],
    [257, 77, 77, 258],
    [9, 8, 7, 6, 5, 4, 3],
]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(family: str, top: str, **more: Any) -> Path:
        return make_pooled(family, top, tmp_path_factory.mktemp(family), **more)

    return make


def vectors(
    folder: Path,
    prompts: list[list[int]],
    chunk: int = 1000,
    second_at: dict[int, int] | None = None,
    **options: Any,
) -> np.ndarray:
    """All in one step, or chunk after chunk; [N, size]"""
    executor, ready = start(folder, **options)
    planner = Planner(executor, ready, options.get("page_size", 4))
    rows = [planner.row(i, prompt, sampling()) for i, prompt in enumerate(prompts)]
    found: dict[int, np.ndarray] = {}
    while open_rows := [row for row in rows if row.computed < len(row.tokens)]:
        extends = [(row, min(chunk, len(row.tokens) - row.computed)) for row in open_rows]
        plan = planner.plan([], extends)
        if second_at:
            plan = replace(
                plan, admits=[replace(admit, second_at=second_at.get(admit.slot, 0)) for admit in plan.admits]
            )
        result = executor.launch(plan).result()
        assert result is not None and result.vectors is not None and len(result.token_ids) == 0
        done = [row.slot for (row, _), is_last in zip(extends, plan.samples, strict=True) if is_last]
        found |= dict(zip(done, result.vectors.reshape(len(done), -1) if done else (), strict=True))
    return np.stack([found[row.slot] for row in rows])


def states(folder: Path, prompt: list[int], **inputs: Any) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt]), **inputs).last_hidden_state[0]


def logits(folder: Path, prompt: list[int], **inputs: Any) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt]), **inputs).logits[0]


POOLED = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_embed_as_transformers_does(pooled: Make, family: str, mode: str) -> None:
    folder = pooled(family, "embed")
    expected = torch.stack([POOLED[mode](states(folder, prompt)) for prompt in PROMPTS])
    np.testing.assert_allclose(vectors(folder, PROMPTS, pooling=mode), expected, atol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_text_has_the_same_vector_alone_and_in_company(pooled: Make, family: str) -> None:
    folder = pooled(family, "embed")
    together = vectors(folder, PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(vectors(folder, [prompt])[0], together[i], atol=1e-5)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_classifiers_say_what_transformers_says(pooled: Make, family: str) -> None:
    folder = pooled(family, "classify", num_labels=3, **({} if family in ENCODERS else {"pad_token_id": 0}))
    expected = torch.stack([logits(folder, prompt) for prompt in PROMPTS])
    np.testing.assert_allclose(vectors(folder, PROMPTS), expected, atol=1e-5)


@pytest.mark.parametrize("classifier_pooling", ["mean", "cls"])
def test_modernbert_with_biases_and_either_pooling(pooled: Make, classifier_pooling: str) -> None:
    biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
    folder = pooled("modernbert", "classify", num_labels=1, classifier_pooling=classifier_pooling, **biases)
    expected = torch.stack([logits(folder, prompt) for prompt in PROMPTS])
    np.testing.assert_allclose(vectors(folder, PROMPTS), expected, atol=1e-5)


def test_the_second_of_two_texts_is_distinguished(pooled: Make) -> None:
    """And only where it is one: the neighbours keep their own."""
    folder = pooled("bert", "classify", num_labels=1)
    pair = [257, 5, 6, 7, 258, 8, 9, 258]
    found = vectors(folder, [pair, pair, PROMPTS[0]], second_at={1: 5})
    types = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    expected = [logits(folder, pair), logits(folder, pair, token_type_ids=types), logits(folder, PROMPTS[0])]
    np.testing.assert_allclose(found, torch.stack(expected), atol=1e-5)
    assert abs(found[0] - found[1]).max() > 1e-4


@pytest.mark.parametrize("mode", ["last", "mean"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_embed_as_transformers_does(pooled: Make, family: str, mode: str) -> None:
    folder = pooled(family, "embed")
    expected = torch.stack([POOLED[mode](states(folder, prompt)) for prompt in PROMPTS])
    np.testing.assert_allclose(vectors(folder, PROMPTS, pooling=mode), expected, atol=2e-5)


def test_a_model_that_generates_embeds_when_configured(tmp_path: Path) -> None:
    """In chunks too: the last token sees all before it in the pages."""
    folder = make_checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    expected = torch.stack([states(folder, prompt)[-1] for prompt in PROMPTS])
    for chunk in (1000, 5):
        np.testing.assert_allclose(vectors(folder, PROMPTS, chunk, is_embedding=True), expected, atol=2e-5)


@pytest.mark.parametrize(("is_tied", "false_token"), [(True, 7), (False, 7), (False, None)])
def test_a_language_model_judges(is_tied: bool, false_token: int | None, tmp_path: Path) -> None:
    """The score is a difference of logits for the next token, in chunks too."""
    folder = make_checkpoint("qwen3", tmp_path, tie_word_embeddings=is_tied)
    (folder / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_Score"}]'
    )
    (folder / "1_Score").mkdir()
    ids = {"true_token_id": 5} | ({} if false_token is None else {"false_token_id": false_token})
    (folder / "1_Score" / "config.json").write_text(json.dumps(ids))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        scores = torch.stack([reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    expected = scores[:, 5] - (0 if false_token is None else scores[:, false_token])
    for chunk in (1000, 5):
        np.testing.assert_allclose(vectors(folder, PROMPTS, chunk)[:, 0], expected, atol=3e-5)


def test_tokens_of_a_judge_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    overrides: dict[str, Any] = {"classifier_from_token": ["n", "y"]}
    pooling = read_config(folder, overrides=overrides).pooling
    assert pooling is not None and len(pooling.judge_ids) == 2
    with pytest.raises(ModelError, match="classifier_from_token"):
        read_config(folder, overrides={"classifier_from_token": ["n", "yes"]})


@pytest.mark.parametrize(
    ("architecture", "size"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)]
)
def test_reward_models(architecture: str, size: int, tmp_path: Path) -> None:
    """Of Qwen 2.5, whose head has a hidden layer; transformers has no class for them."""
    folder = make_reward(architecture, size, tmp_path)
    head = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("score.")
    }
    last = torch.stack([states(tmp_path / "body", prompt)[-1] for prompt in PROMPTS])
    inner = torch.relu(last @ head["score.0.weight"].T + head["score.0.bias"])
    expected = inner @ head["score.2.weight"].T + head["score.2.bias"]
    for chunk in (1000, 5):
        np.testing.assert_allclose(vectors(folder, PROMPTS, chunk), expected, atol=5e-5)


def test_the_reward_model_of_internlm2(tmp_path: Path) -> None:
    """Its published code: a linear layer without a bias over the last token's vector; other names."""
    body = make_pooled("llama", "embed", tmp_path / "body", num_key_value_heads=2)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    tensors = {"v_head.weight": head}
    names = {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    stored = load_file(body / "model.safetensors")
    for i in range(2):
        q, k, v = (stored.pop(f"layers.{i}.self_attn.{part}_proj.weight") for part in "qkv")
        groups = [part.view(2, -1, 64) for part in (q, k, v)]  # of both key/value heads
        tensors[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(groups, 1).flatten(0, 1)
    for name, tensor in stored.items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[f"model.{name}"] = tensor
    folder = tmp_path / "reward"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((body / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForRewardModel"], "bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    expected = torch.stack([states(body, prompt)[-1] for prompt in PROMPTS]) @ head.T
    for chunk in (1000, 5):
        np.testing.assert_allclose(vectors(folder, PROMPTS, chunk), expected, atol=5e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_heads_that_an_embedding_does_not_use_are_left_out(pooled: Make, family: str) -> None:
    folder = pooled(family, "masked")
    expected = torch.stack([states(folder, prompt).mean(0) for prompt in PROMPTS])
    np.testing.assert_allclose(vectors(folder, PROMPTS), expected, atol=1e-5)


def test_an_encoder_takes_no_memory_for_pages(pooled: Make) -> None:
    _, ready = start(pooled("bert", "embed"), max_len=128)
    assert ready.pages_bytes == 0 and ready.num_pages > 8 * 128 // 4
