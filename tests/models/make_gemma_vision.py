"""Tiny random checkpoints of Gemma 3 with images, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.models.make import LOCAL, SIZES, randomize, write_tokenizer

PLACEHOLDER, ROW, END = 255, 254, 253  # bytes that no text of these tests has
ROWS = 16
PREPARATION = {"size": {"height": 24, "width": 24}, "resample": 2, "do_pan_and_scan": None}
PREPARATION |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 3,
    "vision_use_head": False,
}


def make_gemma_vision(folder: Path, **own: Any) -> Gemma3ForConditionalGeneration:
    """Writes a Gemma 3 of 16 rows an image, two of whose layers have a window of 7 tokens. -> transformers'
    model of it"""
    text = SIZES | {"head_dim": 16, "num_hidden_layers": 3} | LOCAL | own
    config = Gemma3Config(
        vision_config=SIGLIP,
        text_config=text,
        tie_word_embeddings=False,  # else answers repeat one token
        mm_tokens_per_image=ROWS,
        boi_token_index=PLACEHOLDER,
        eoi_token_index=END,
        image_token_index=ROW,
    )
    torch.manual_seed(0)
    model = randomize(Gemma3ForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model


def greedy_gemma_vision(
    folder: Path,
    model: Gemma3ForConditionalGeneration,
    prompt: Sequence[int],
    images: Sequence[np.ndarray],
    count: int,
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder an image, and the prompt's number of
    tokens."""
    newlines = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n\n").ids
    image = [*newlines, PLACEHOLDER, *[ROW] * ROWS, END, *newlines]
    tokens = [i for token in prompt for i in (image if token == PLACEHOLDER else [token])]
    start, given = len(tokens), dict[str, Any]()
    if images:
        processor = Gemma3ImageProcessorPil(**PREPARATION)
        given["pixel_values"] = processor(list(images), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        for _ in range(count):
            kinds = [int(token == ROW and at < start) for at, token in enumerate(tokens)]
            logits = model(
                input_ids=torch.tensor([tokens]),
                token_type_ids=torch.tensor([kinds]),
                use_cache=False,
                **given,
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start
