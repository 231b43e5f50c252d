"""Tiny random checkpoints of DeepSeek-OCR 2, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil

from tests.models.make import SIZES, randomize, write_tokenizer
from tests.models.make_media import PLACEHOLDER

TILE_ROWS, WHOLE_ROWS = 144, 256  # the encoder's learned queries
PREPARATION: dict[str, Any] = {"size": {"height": 64, "width": 64}, "tile_size": 48, "max_patches": 4}
SAM = {
    "hidden_size": 16,
    "output_channels": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 1,
    "mlp_dim": 24,
    "window_size": 10,
    "global_attn_indexes": [1],
    "downsample_channels": [20, 32],
}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXT = SIZES | {
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "mlp_layer_types": ["dense", "sparse"],
}


def make_deepseek_ocr(folder: Path) -> DeepseekOcr2ForConditionalGeneration:
    """Writes a DeepSeek-OCR 2 whose text model has experts in its second layer. -> transformers' model of
    it"""
    config = DeepseekOcr2Config(
        vision_config={"sam_config": SAM, "encoder_config": DECODER},
        text_config=TEXT,
        image_token_id=PLACEHOLDER,
    )
    torch.manual_seed(2)  # answers depend on images
    model = randomize(DeepseekOcr2ForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model


def greedy_deepseek_ocr(
    model: DeepseekOcr2ForConditionalGeneration,
    prompt: Sequence[int],
    images: Sequence[np.ndarray],
    count: int,
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder an image, and the prompt's number of
    tokens."""
    outputs: dict[str, Any] = {}
    counts: list[int] = []
    with torch.inference_mode():
        if images:
            found = DeepseekOcr2ImageProcessorPil(**PREPARATION)(list(images), return_tensors="pt")
            outputs["image"] = model.model.get_image_features(**found, return_dict=True)
            counts = [TILE_ROWS * tiles + WHOLE_ROWS + 1 for tiles in found["num_local_patches"]]
        left = iter(counts)
        tokens = [i for token in prompt for i in [token] * (next(left) if token == PLACEHOLDER else 1)]
        start = len(tokens)
        for _ in range(count):
            logits = model(
                input_ids=torch.tensor([tokens]), mm_encoder_outputs=outputs or None, use_cache=False
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start
