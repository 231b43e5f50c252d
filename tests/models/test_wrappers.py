"""Text models in checkpoints of models that take images too, against transformers' wrappers of text alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from runtime.models.config.wrappers import TEXT_MODELS, WRAPPERS
from tests.devices.drive import Planner, sampling, start
from tests.models.hybrids import DELTA, QWEN_EXPERTS
from tests.models.make import (
    EXPERTS,
    LOCAL,
    LOCAL_EXPERTS,
    SIGMOID,
    SIZES,
    VOCAB_SIZE,
    randomize,
    write_tokenizer,
)
from tests.models.step3 import SIZES as STEP3

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
QUARTER = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# wrapper -> name of its config class, fields of its text part, of its vision part, and of itself
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"head_dim": 16, "num_hidden_layers": 3, "tie_word_embeddings": True, **LOCAL},
        VISION,
        {"mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_hidden_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "tie_word_embeddings": True,
            **LOCAL,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        VISION | {"head_dim": 16, "num_key_value_heads": 2},
        {},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"model_type": "ministral3", "head_dim": 16},
        VISION | {"head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4Config",
        LOCAL_EXPERTS | {"num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 72},
        VISION
        | {
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        {},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"rope_parameters": MROPE},
        QWEN_VISION | {"hidden_size": 64},
        {},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": MROPE},
        QWEN_VISION,
        {"tie_word_embeddings": True},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN_VISION,
        {},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        EXPERTS | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN_VISION,
        {},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5Config",
        DELTA | {"head_dim": 32, "rope_parameters": QUARTER},
        QWEN_VISION,
        {},
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeConfig",
        DELTA | QWEN_EXPERTS | {"head_dim": 32, "rope_parameters": QUARTER},
        QWEN_VISION,
        {},
    ),
    "Glm4vForConditionalGeneration": (
        "Glm4vConfig",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        QWEN_VISION,
        {},
    ),
    "Glm4vMoeForConditionalGeneration": (
        "Glm4vMoeConfig",
        SIGMOID
        | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        QWEN_VISION,
        {},
    ),
    "InternVLForConditionalGeneration": (
        "InternVLConfig",
        {"model_type": "qwen3", "head_dim": 16},
        VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        {"tie_word_embeddings": False},
    ),
    "LlavaForConditionalGeneration": ("LlavaConfig", {"model_type": "llama"}, VISION, {}),
    "Step3p7ForConditionalGeneration": ("Step3p7Config", STEP3, VISION, {"tie_word_embeddings": False}),
}
NUM_TOKENS = 12


def make_wrapper(case: str, folder: Path) -> torch.nn.Module:
    """Writes a tiny random checkpoint. -> transformers' own model of it."""
    kind, text, vision, own = CASES[case]
    config = getattr(transformers, kind)(text_config=SIZES | text, vision_config=vision, **own)
    torch.manual_seed(0)
    model = randomize(getattr(transformers, case)(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def continued(folder: Path, prompt: list[int]) -> list[int]:
    executor, ready = start(folder)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, prompt, sampling())
    planner.prefill(row, chunk=11)
    while len(row.tokens) < len(prompt) + NUM_TOKENS:
        planner.run([row], [])
    return row.tokens[len(prompt) :]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    if isinstance(model, transformers.Llama4ForConditionalGeneration):
        model = model.language_model  # the whole one fails without images in transformers 5.24
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + NUM_TOKENS:
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_text_equals_transformers(case: str, tmp_path: Path) -> None:
    model = make_wrapper(case, tmp_path)
    prompt = np.random.default_rng(3).integers(0, VOCAB_SIZE - 3, 30).tolist()
    assert continued(tmp_path, prompt) == greedy(model, prompt)
    config = read_config(tmp_path)
    assert config.wrapper == case and config.architecture.endswith("ForCausalLM")


def write_config(folder: Path, text: dict[str, Any], **own: Any) -> None:
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(fields | own))


def test_older_files_have_one_level_and_other_names(tmp_path: Path) -> None:
    """The two layouts of names, and a config.json without text_config, as Qwen 2.5-VL was published."""
    case = "Qwen2_5_VLForConditionalGeneration"
    model = make_wrapper(case, tmp_path)
    prompt = list(range(40, 60))
    expected = greedy(model, prompt)
    fields = json.loads((tmp_path / "config.json").read_text())
    text = fields.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps(text | fields))
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model.language_model.").removeprefix("model."): name for name in tensors}
    assert any(name.startswith("visual.") for name in bare), "vision weights are there to be skipped"
    layouts = "model.language_model.", "language_model.model."
    for prefix in layouts:
        named = {
            new if new.startswith("visual.") else prefix + new: tensors[name] for new, name in bare.items()
        }
        save_file(named, tmp_path / "model.safetensors")
        assert continued(tmp_path, prompt) == expected


def test_weights_that_are_no_known_part_are_refused(tmp_path: Path) -> None:
    make_wrapper("LlavaForConditionalGeneration", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"language_model.model.more.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="language_model.model.more.weight"):
        start(tmp_path)


def test_text_config_wins_and_the_rest_is_shared(tmp_path: Path) -> None:
    text = SIZES | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    text.pop("eos_token_id")
    write_config(tmp_path, text, dtype="bfloat16", eos_token_id=[7, 8], hidden_size=1)
    config = read_config(tmp_path, overrides={"max_position_embeddings": 99})
    assert (config.hidden_size, config.dtype, config.eos_ids) == (64, "bfloat16", (7, 8))
    assert config.context_len == 99 and not config.is_tied and config.windows == (0, 0)
    write_config(tmp_path, text, tie_word_embeddings=True)
    assert read_config(tmp_path).is_tied


def test_published_gemma_leaves_defaults_out(tmp_path: Path) -> None:
    """text_config of gemma-3-4b-it, whose rope reaches as far as max_position_embeddings says."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    write_config(tmp_path, text, architectures=["Gemma3ForConditionalGeneration"])
    config = read_config(tmp_path)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.windows[:6] == (1024,) * 5 + (0,) and config.context_len == 131072


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, "text_config must be an object"),
        ({"model_type": "mamba"}, "text_config.model_type mamba"),
        ({"model_type": ["x"]}, "text_config.model_type"),
        (SIZES | {"hidden_size": "wide"}, r"hidden_size"),
        ({"model_type": "llama4_text"}, "vocab_size"),
    ],
)
def test_broken_text_config(text: Any, message: str, tmp_path: Path) -> None:
    write_config(tmp_path, text)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_transformers_code_computes_whole_wrappers(tmp_path: Path) -> None:
    """Their text alone where that is wanted; images where config.json says what stands for them, and the
    class is one of transformers."""
    write_config(tmp_path, SIZES)
    assert not read_config(tmp_path, model_impl="transformers", takes_media=False).wrapper
    with pytest.raises(ModelError, match="config.json has no model_type, or none of image_token_id"):
        read_config(tmp_path, model_impl="transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["InternVLChatModel"]}))
    with pytest.raises(ModelError, match="leave the option out"):
        read_config(tmp_path, model_impl="transformers")


def test_every_wrapper_has_a_text_model() -> None:
    assert set(WRAPPERS.values()) <= set(TEXT_MODELS)


def test_stacks_of_experts_in_both_orders(tmp_path: Path) -> None:
    """Published files have inputs before outputs, those that transformers 5 writes the other way round."""
    model = make_wrapper("Qwen3VLMoeForConditionalGeneration", tmp_path)
    prompt = list(range(40, 60))
    tensors = load_file(tmp_path / "model.safetensors")
    stacks = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    assert len(stacks) == 4
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stacks.items()}
    save_file(tensors | turned, tmp_path / "model.safetensors")
    assert continued(tmp_path, prompt) == greedy(model, prompt)
