"""Tiny random checkpoints of Qwen3-VL and Qwen3.5, and what transformers generates of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from tests.models.hybrids import DELTA, QWEN_EXPERTS
from tests.models.make import EXPERTS, SIZES, randomize, write_tokenizer
from tests.models.make_media import (
    FRAME_TIMES_S,
    PLACEHOLDER,
    QWEN_KINDS,
    QWEN_PLACEHOLDERS,
    QWEN_PREPARATION,
    VIDEO_PLACEHOLDER,
)

Qwen3Vl = (
    Qwen3VLForConditionalGeneration
    | Qwen3VLMoeForConditionalGeneration
    | Qwen3_5ForConditionalGeneration
    | Qwen3_5MoeForConditionalGeneration
)
START, END = 253, 252  # around the tokens of an image, or of a moment
VIDEO_PREPARATION = QWEN_PREPARATION | {"size": {"shortest_edge": 2048, "longest_edge": 8192}}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
TEXT = SIZES | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


TEXT_35 = SIZES | DELTA | {"head_dim": 32}
TEXT_35 |= {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}


def make_qwen3_vl(folder: Path, kind: str = "dense") -> Qwen3Vl:
    """Writes a Qwen3-VL, `kind` dense or moe, or a Qwen3.5, `kind` 3.5 or 3.5 moe, whose images are of 4 to
    40 rows. -> transformers' model of it"""
    marks = {"vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed({"moe": 3}.get(kind, 0))  # answers depend on images
    model: Qwen3Vl
    if kind == "dense":
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(vision_config=VISION, text_config=TEXT, **QWEN_PLACEHOLDERS, **marks)
        )
    elif kind.startswith("3.5"):
        vision = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
        parts: dict[str, Any] = {"vision_config": vision, **QWEN_PLACEHOLDERS, **marks}
        if kind == "3.5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT_35, **parts))
        else:
            text = TEXT_35 | QWEN_EXPERTS
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, **parts))
    else:
        config = Qwen3VLMoeConfig(
            vision_config=VISION, text_config=TEXT | EXPERTS, **QWEN_PLACEHOLDERS, **marks
        )
        model = Qwen3VLMoeForConditionalGeneration(config)
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PREPARATION))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPARATION))
    return model


def greedy_qwen3_vl(
    folder: Path, model: Qwen3Vl, prompt: Sequence[int], files: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a prompt with one placeholder a file, and the prompt's number of
    tokens."""
    tokens, given = prepared_qwen3_vl(folder, prompt, files)
    start = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(**arguments(model, tokens, start, given)).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start


def vector_qwen3_vl(
    folder: Path, model: Qwen3Vl, prompt: Sequence[int], files: Sequence[np.ndarray]
) -> np.ndarray:
    """The last token's vector of length 1, of a prompt with one placeholder a file."""
    tokens, given = prepared_qwen3_vl(folder, prompt, files)
    with torch.inference_mode():
        hidden = model.model(**arguments(model, tokens, len(tokens), given)).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden, dim=0).numpy()


def arguments(model: Qwen3Vl, tokens: list[int], start: int, given: dict[str, Any]) -> dict[str, Any]:
    """The model's arguments for a prompt of `start` tokens and what follows it."""
    kinds = [QWEN_KINDS.get(token, 0) if at < start else 0 for at, token in enumerate(tokens)]
    model.model.rope_deltas = None  # of another prompt
    types = {"mm_token_type_ids": torch.tensor([kinds]) if given else None}
    return {"input_ids": torch.tensor([tokens]), "use_cache": False, **types, **given}


def prepared_qwen3_vl(
    folder: Path, prompt: Sequence[int], files: Sequence[np.ndarray]
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a prompt with one placeholder a file, and the model's arguments for the files."""
    images, videos = ([file for file in files if file.ndim == ndim] for ndim in (3, 4))
    given: dict[str, Any] = {}
    parts: dict[int, list[list[int]]] = {PLACEHOLDER: [], VIDEO_PLACEHOLDER: []}
    if images:
        prepared = Qwen2VLImageProcessorPil(**QWEN_PREPARATION)(images, return_tensors="pt")
        given |= {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}
        sizes = (prepared["image_grid_thw"].prod(dim=1) // 4).tolist()
        parts[PLACEHOLDER] = [[PLACEHOLDER] * size for size in sizes]
    if videos:
        prepared_videos = [video_pixels(video) for video in videos]
        given["pixel_values_videos"] = torch.cat([pixels for pixels, _ in prepared_videos])
        given["video_grid_thw"] = torch.cat([grid for _, grid in prepared_videos])
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        parts[VIDEO_PLACEHOLDER] = [
            video_tokens(tokenizer, len(video), *grid[0].tolist())
            for video, (_, grid) in zip(videos, prepared_videos, strict=True)
        ]
    left = {token: iter(one) for token, one in parts.items()}
    return [i for token in prompt for i in (next(left[token]) if token in left else [token])], given


def video_tokens(tokenizer: Tokenizer, frames: int, count: int, rows: int, columns: int) -> list[int]:
    """The tokens of a video, with the times of its moments as Qwen3VLProcessor writes them."""
    times = [FRAME_TIMES_S * min(index, frames - 1) for index in range(2 * count)]
    tokens: list[int] = []
    for first, last in zip(times[::2], times[1::2], strict=True):
        tokens += tokenizer.encode(f"<{(first + last) / 2:.1f} seconds>").ids
        tokens += [START, *[VIDEO_PLACEHOLDER] * (rows * columns // 4), END]
    return tokens


def video_pixels(frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of a video of the size that Qwen3VLVideoProcessor gives it, whose frames transformers'
    processor of images prepares, and its grid."""
    sizes = {"factor": 8, "min_pixels": 2048, "max_pixels": 8192}
    height, width = smart_resize(len(frames), *frames.shape[1:3], **sizes)
    frames = np.concatenate([frames, frames[-1:]])[: -(-len(frames) // 2) * 2]
    resized = [np.asarray(Image.fromarray(one).resize((width, height), 3)) for one in frames]
    processor = Qwen2VLImageProcessorPil(**QWEN_PREPARATION | {"do_resize": False})
    prepared = processor(resized, return_tensors="pt")
    _, rows, columns = prepared["image_grid_thw"][0].tolist()
    # each image has been made two equal frames
    whole = prepared["pixel_values"].view(len(frames) // 2, 2, rows * columns, 3, 2, -1)
    pixels = torch.stack((whole[:, 0, :, :, 0], whole[:, 1, :, :, 0]), dim=3)
    return pixels.reshape(len(pixels) * rows * columns, -1), torch.tensor([[len(pixels), rows, columns]])
