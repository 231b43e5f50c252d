"""Tiny random CLIP, SigLIP and NaFlex SigLIP 2 models, and what transformers makes of texts and images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPConfig, CLIPModel, Siglip2Config, Siglip2Model, SiglipConfig, SiglipModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from tests.models.make import randomize, write_tokenizer

END, PAD = 257, 256  # <|im_end|> and <|endoftext|> of the tests' tokenizer
TEXT = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "eos_token_id": END,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
SIZE = {"height": 28, "width": 28}
PREPARATION: dict[str, dict[str, Any]] = {
    "clip": {"size": {"shortest_edge": 28}, "crop_size": SIZE},
    "siglip": {"size": SIZE},
    "naflex": {"patch_size": 7, "max_num_patches": 20},
}
Dual = CLIPModel | SiglipModel | Siglip2Model


def make_dual(folder: Path, kind: str) -> Dual:
    """Writes a CLIP whose tokenizer ends texts with END, or a SigLIP. -> transformers' model of it"""
    torch.manual_seed(0)
    model: Dual
    if kind == "clip":
        model = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=20))
    else:
        text = TEXT | {"projection_size": VISION["hidden_size"], "pad_token_id": PAD}
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=VISION))
        if kind == "naflex":
            vision = {name: value for name, value in VISION.items() if name != "image_size"}
            model = Siglip2Model(Siglip2Config(text_config=text, vision_config=vision | {"num_patches": 16}))
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "<|endoftext|>"}))
    if kind == "clip":
        end_texts(folder / "tokenizer.json")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION[kind]))
    return model


def end_texts(path: Path) -> None:
    """Has the tokenizer put END behind each text."""
    tokenizer, mark = json.loads(path.read_text()), "<|im_end|>"
    end = {"SpecialToken": {"id": mark, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, second, end],
        "special_tokens": {mark: {"id": mark, "ids": [END], "tokens": [mark]}},
    }
    path.write_text(json.dumps(tokenizer))


def text_vector(model: Dual, ids: Sequence[int]) -> np.ndarray:
    """The vector of a text without its end, float32."""
    if isinstance(model, CLIPModel):
        given = [*ids, END]
    else:
        given = [*ids, *[PAD] * (TEXT["max_position_embeddings"] - len(ids))]  # type: ignore[operator]
    with torch.inference_mode():
        return pooled(model.get_text_features(input_ids=torch.tensor([given])))


def image_vector(model: Dual, image: np.ndarray) -> np.ndarray:
    """The vector of an image that transformers prepares, float32."""
    if isinstance(model, Siglip2Model):
        found = Siglip2ImageProcessorPil(**PREPARATION["naflex"])([image], return_tensors="pt")
        with torch.inference_mode():
            return pooled(model.get_image_features(**found))
    if isinstance(model, CLIPModel):
        prepared = CLIPImageProcessorPil(**PREPARATION["clip"])([image], return_tensors="pt")
    else:
        prepared = SiglipImageProcessorPil(**PREPARATION["siglip"])([image], return_tensors="pt")
    with torch.inference_mode():
        return pooled(model.get_image_features(pixel_values=prepared["pixel_values"]))


def pooled(found: Any) -> np.ndarray:
    """A vector of what transformers returns."""
    vectors = found if isinstance(found, torch.Tensor) else found.pooler_output
    return vectors[0].numpy()
