"""Tiny random checkpoints of Pixtral, Mistral Small 3.1 and InternVL 3, and what transformers generates of
them."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.models.dense import DENSE
from tests.models.make import FAMILIES, SIZES, randomize, write_tokenizer
from tests.models.make_media import PLACEHOLDER, name_placeholder

FIRST_MARK, SECOND_MARK = 253, 252  # tokens that stand among those of an image
PATCH = 4
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
ROW_PREPARATION: dict[str, Any] = {"size": {"longest_edge": 40}}
TILE = 16
INTERN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [TILE, TILE],
    "patch_size": [PATCH, PATCH],
}
TILE_ROWS = (TILE // PATCH // 2) ** 2  # of a tile's encoding
TILE_PREPARATION: dict[str, Any] = {"size": {"height": TILE, "width": TILE}, "max_patches": 5}


TEXTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral3": DENSE["ministral3"][1],
    "mistral4": FAMILIES["mistral4"][1],
}


class Family(Protocol):
    """A family of models: its checkpoint, and what transformers' processor makes of images."""

    def make(self, folder: Path) -> PreTrainedModel:
        """Writes a model. -> transformers' model of it"""
        ...

    def prepare(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """The model's arguments for images, and of each image the tokens in place of its placeholder."""
        ...


def write(model: PreTrainedModel, folder: Path, preparation: dict[str, Any], marks: tuple[str, str]) -> None:
    """Writes the files of a model whose tokens `marks` stand among those of an image."""
    randomize(model).save_pretrained(folder)
    write_tokenizer(folder)
    for mark, id in zip(marks, (FIRST_MARK, SECOND_MARK), strict=True):
        name_placeholder(folder, mark, "", id)
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))


class Rows:
    """Pixtral, or with `merge` 2 Mistral Small 3.1 and its successors, by their `text` models."""

    def __init__(self, merge: int, text: str = "mistral", **own: Any) -> None:
        """`own`: fields of vision_config."""
        self.unit, self.text, self.vision = merge * PATCH, text, PIXTRAL | own
        self.is_mistral3 = merge > 1

    def make(self, folder: Path) -> PreTrainedModel:
        """See Family."""
        torch.manual_seed(2 if self.text == "ministral3" else 0)  # no answer has the placeholder
        model: PreTrainedModel
        if self.is_mistral3:
            text = SIZES | TEXTS[self.text] | {"model_type": self.text}
            model = Mistral3ForConditionalGeneration(
                Mistral3Config(
                    vision_config=self.vision,
                    text_config=text,
                    image_token_index=PLACEHOLDER,
                    tie_word_embeddings=self.text == "mistral",
                )
            )
        else:
            text = SIZES | {"model_type": "mistral", "sliding_window": None}
            own = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
            model = LlavaForConditionalGeneration(
                LlavaConfig(vision_config=self.vision, text_config=text, image_token_id=PLACEHOLDER, **own)
            )
        write(model.eval(), folder, ROW_PREPARATION, ("[IMG_BREAK]", "[IMG_END]"))
        return model

    def prepare(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """See Family."""
        side = {"height": self.unit, "width": self.unit}
        found = PixtralImageProcessorPil(**ROW_PREPARATION, patch_size=side)(
            list(images), return_tensors="pt"
        )
        rows = [
            ([*[PLACEHOLDER] * (width // self.unit), FIRST_MARK] * (height // self.unit))[:-1] + [SECOND_MARK]
            for height, width in found["image_sizes"].tolist()
        ]
        return {name: found[name] for name in ("pixel_values", "image_sizes")}, rows


class Tiles:
    """InternVL 3; `own` are fields of vision_config."""

    def __init__(self, **own: Any) -> None:
        self.own = own

    def make(self, folder: Path) -> PreTrainedModel:
        """See Family."""
        torch.manual_seed(0)
        text = SIZES | {"model_type": "qwen2"}
        config = InternVLConfig(vision_config=INTERN | self.own, text_config=text, image_token_id=PLACEHOLDER)
        model = InternVLForConditionalGeneration(config)
        write(model.eval(), folder, TILE_PREPARATION, ("<img>", "</img>"))
        return model

    def prepare(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """See Family."""
        found = GotOcr2ImageProcessorPil(**TILE_PREPARATION, crop_to_patches=True)(
            list(images), return_tensors="pt"
        )
        tokens = [
            [FIRST_MARK, *[PLACEHOLDER] * TILE_ROWS * count, SECOND_MARK]
            for count in found["num_patches"].tolist()
        ]
        return {"pixel_values": found["pixel_values"]}, tokens

    def frames(self, video: np.ndarray, encode: Callable[[str], list[int]]) -> tuple[torch.Tensor, list[int]]:
        """Pixels of a video [frames, height, width, 3], each frame as one tile, and its tokens as
        InternVLProcessor writes them. `encode`: the tokens of a text."""
        found = GotOcr2ImageProcessorPil(**TILE_PREPARATION, crop_to_patches=False)(
            list(video), return_tensors="pt"
        )
        tokens: list[int] = []
        for number in range(1, len(video) + 1):
            tokens += encode(f"Frame{number}: " if number == 1 else f"\nFrame{number}: ")
            tokens += [FIRST_MARK, *[PLACEHOLDER] * TILE_ROWS, SECOND_MARK]
        return found["pixel_values"], tokens


AUTHORS_NAMES = (  # of transformers' layout of InternVL -> that of its authors, in this order
    ("vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    ("vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    ("vision_tower.embeddings.patch_embeddings.projection.", "vision_model.embeddings.patch_embedding."),
    ("vision_tower.encoder.layer.", "vision_model.encoder.layers."),
    (".attention.projection_layer.", ".attn.proj."),
    (".attention.", ".attn."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".lambda_1", ".ls1"),
    (".lambda_2", ".ls2"),
    ("multi_modal_projector.layer_norm.", "mlp1.0."),
    ("multi_modal_projector.linear_1.", "mlp1.1."),
    ("multi_modal_projector.linear_2.", "mlp1.3."),
)
JOINED = re.compile(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)")


def write_internvl_chat(folder: Path, target: Path) -> None:
    """Writes a checkpoint of InternVL in the layout of transformers as its authors would (InternVLChatModel),
    of the same tiles and colors."""
    target.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    name_placeholder(target, "<IMG_CONTEXT>", "{{ messages[0].content }}")
    fields = json.loads((folder / "config.json").read_text())
    vision, kept = fields["vision_config"], ("hidden_size", "intermediate_size", "num_hidden_layers")
    kept += ("num_attention_heads", "hidden_act", "norm_type", "layer_norm_eps")
    own = {name: vision[name] for name in kept} | {"image_size": TILE, "patch_size": PATCH}
    own |= {"qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"]}
    config = {
        "architectures": ["InternVLChatModel"],
        "llm_config": fields["text_config"] | {"tie_word_embeddings": fields["tie_word_embeddings"]},
        "vision_config": own,
        "ps_version": "v2",
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "max_dynamic_patch": TILE_PREPARATION["max_patches"],
    }
    (target / "config.json").write_text(json.dumps(config))
    colors = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
    (target / "preprocessor_config.json").write_text(json.dumps(colors | {"size": TILE, "crop_size": TILE}))
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name.startswith(("language_model.layers.", "language_model.embed", "language_model.norm.")):
            name = name.replace("language_model.", "language_model.model.", 1)
        name = f"language_model.{name}" if name.startswith("lm_head.") else name
        for old, new in AUTHORS_NAMES:
            name = name.replace(old, new)
        if (joined := JOINED.fullmatch(name)) and "vision_model" in name:
            parts.setdefault(f"{joined[1]}qkv.{joined[3]}", {})[joined[2]] = tensor
        else:
            found[name] = tensor
    found |= {name: torch.cat([three[part] for part in "qkv"]) for name, three in parts.items()}
    save_file(found, target / "model.safetensors")


def greedy_images(
    family: Family, model: PreTrainedModel, prompt: Sequence[int], images: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder an image, with its own processor, and the
    prompt's number of tokens."""
    given, expanded = family.prepare(images) if images else ({}, [])
    places = iter(expanded)
    tokens = [i for token in prompt for i in (next(places) if token == PLACEHOLDER else [token])]
    return greedy_of(model, tokens, given, count), len(tokens)


def greedy_of(model: PreTrainedModel, tokens: list[int], given: dict[str, Any], count: int) -> list[int]:
    """What transformers generates of tokens and the files that are `given` with them."""
    tokens, start = list(tokens), len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False, **given).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]
