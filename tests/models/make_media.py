"""Tiny random checkpoints of models that take images, and what transformers generates of them."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.messages.media import Media, MediaKind, MediaSource
from tests.models.make import SIZES, randomize, write_tokenizer

PLACEHOLDER, VIDEO_PLACEHOLDER = 255, 254  # bytes that no text of these tests has
FRAME_TIMES_S = 0.5  # from one frame to the next
IMAGE_SIZE, PATCH_SIZE = 28, 7
ROWS = (IMAGE_SIZE // PATCH_SIZE) ** 2
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
PREPARATION = {
    "size": {"shortest_edge": IMAGE_SIZE},
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}


def make_llava(folder: Path, **own: Any) -> LlavaForConditionalGeneration:
    """Writes a LLaVA of 16 rows an image. -> transformers' model of it"""
    config = LlavaConfig(
        vision_config=CLIP, text_config=SIZES | {"model_type": "llama"}, image_token_id=PLACEHOLDER, **own
    )
    torch.manual_seed(0)
    model = randomize(LlavaForConditionalGeneration(config).eval())
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model


def picture(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    """A random image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def greedy(
    model: LlavaForConditionalGeneration, prompt: Sequence[int], images: Sequence[np.ndarray], count: int
) -> list[int]:
    """What transformers generates of a prompt with one placeholder an image, with its own processor."""
    tokens = [i for token in prompt for i in ([token] * (ROWS if token == PLACEHOLDER else 1))]
    start = len(tokens)
    pixels = (
        CLIPImageProcessor(**PREPARATION)(list(images), return_tensors="pt")["pixel_values"]
        if images
        else None
    )
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), pixel_values=pixels, use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]


QwenVl = Qwen2VLForConditionalGeneration | Qwen2_5_VLForConditionalGeneration
QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TEXT = SIZES | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
}
QWEN_PLACEHOLDERS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO_PLACEHOLDER}
QWEN_KINDS = {PLACEHOLDER: 1, VIDEO_PLACEHOLDER: 2}
TOKENS_PER_S = 2
QWEN_PREPARATION = {
    "size": {"shortest_edge": 256, "longest_edge": 2560},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def make_qwen_vl(folder: Path, version: str, **own: Any) -> QwenVl:
    """Writes a Qwen2-VL or Qwen2.5-VL, `version` 2 or 2.5, whose images are of 4 to 40 rows. -> transformers'
    model of it"""
    hidden = SIZES["hidden_size"]
    torch.manual_seed(0)
    model: QwenVl
    if version == "2":
        vision = QWEN_VISION | {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": hidden}
        model = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(vision_config=vision, text_config=QWEN_TEXT | own, **QWEN_PLACEHOLDERS)
        )
    else:
        vision = QWEN_VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": hidden}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": TOKENS_PER_S}
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(vision_config=vision, text_config=QWEN_TEXT | own, **QWEN_PLACEHOLDERS)
        )
    randomize(model.eval()).save_pretrained(folder)
    write_tokenizer(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(QWEN_PREPARATION))
    return model


def greedy_qwen_vl(
    model: QwenVl, prompt: Sequence[int], files: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """As `greedy`, of images and videos with the processor of Qwen2-VL, and the prompt's number of tokens."""
    given: dict[str, Any] = {}
    sizes: dict[int, list[int]] = {PLACEHOLDER: [], VIDEO_PLACEHOLDER: []}
    images, videos = ([file for file in files if file.ndim == ndim] for ndim in (3, 4))
    if images:
        prepared = Qwen2VLImageProcessorPil(**QWEN_PREPARATION)(images, return_tensors="pt")
        given |= {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}
        sizes[PLACEHOLDER] = (prepared["image_grid_thw"].prod(dim=1) // 4).tolist()
    if videos:
        parts = [video_pixels(video) for video in videos]
        grids = torch.cat([grid for _, grid in parts])
        given |= {"pixel_values_videos": torch.cat([pixels for pixels, _ in parts]), "video_grid_thw": grids}
        sizes[VIDEO_PLACEHOLDER] = (grids.prod(dim=1) // 4).tolist()
        if isinstance(model, Qwen2_5_VLForConditionalGeneration):
            given["second_per_grid_ts"] = torch.tensor([2 * FRAME_TIMES_S] * len(videos))
    left = {token: iter(one) for token, one in sizes.items()}
    tokens = [i for token in prompt for i in [token] * (next(left[token]) if token in left else 1)]
    start = len(tokens)
    types = [QWEN_KINDS.get(token, 0) for token in tokens] + [0] * count
    with torch.inference_mode():
        for _ in range(count):
            kinds = torch.tensor([types[: len(tokens)]]) if files else None
            model.model.rope_deltas = None  # of another prompt
            logits = model(
                input_ids=torch.tensor([tokens]), mm_token_type_ids=kinds, use_cache=False, **given
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:], start


def video_pixels(frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of a video, whose frames transformers' processor of images prepares, and its grid."""
    frames = np.concatenate([frames, frames[-1:]])[: -(-len(frames) // 2) * 2]
    prepared = Qwen2VLImageProcessorPil(**QWEN_PREPARATION)(list(frames), return_tensors="pt")
    _, rows, columns = prepared["image_grid_thw"][0].tolist()
    # each image has been made two equal frames
    whole = prepared["pixel_values"].view(len(frames) // 2, 2, rows * columns, 3, 2, -1)
    pixels = torch.stack((whole[:, 0, :, :, 0], whole[:, 1, :, :, 0]), dim=3)
    return pixels.reshape(len(pixels) * rows * columns, -1), torch.tensor([[len(pixels), rows, columns]])


def name_placeholder(folder: Path, mark: str, template: str, id: int = PLACEHOLDER) -> None:
    """Gives the placeholder a text, and the model a chat template that writes it."""
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    del vocab[next(text for text, token in vocab.items() if token == id)]
    vocab[mark] = id
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].insert(0, {"id": id, "content": mark, "special": True} | flags)
    path.write_text(json.dumps(tokenizer))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))


File = np.ndarray | tuple[np.ndarray, np.ndarray]
KIND_OF = {1: MediaKind.AUDIO, 3: MediaKind.IMAGE, 4: MediaKind.VIDEO}  # by the dimensions of an array


class ArrayLoader:
    """In place of what fetches and decodes files: sources name arrays."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def source(self, array: File) -> MediaSource:
        """A source whose file is this array: samples at 16 kHz, an image, or frames of a video; or frames and
        samples of a video with its sound."""
        shown, *sounds = array if isinstance(array, tuple) else (array,)
        url = f"data:{sha256(b''.join(one.tobytes() for one in (shown, *sounds))).hexdigest()}"
        self._arrays[url] = shown
        if sounds:
            self._arrays[f"sound of {url}"] = sounds[0]
        return MediaSource(kind=KIND_OF[shown.ndim], param="media", url=url, has_sound=bool(sounds))

    def check(self, sources: Sequence[MediaSource]) -> None:
        """See MediaLoader."""

    def hold(self, values: np.ndarray) -> None:
        """See MediaLoader."""

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """See MediaLoader."""
        return [
            structs.replace(
                media_of(self._arrays[one.url], one.kind),
                sound=media_of(self._arrays[f"sound of {one.url}"], MediaKind.AUDIO)
                if one.has_sound
                else None,
            )
            for one in sources
        ]


def media_of(array: np.ndarray, kind: MediaKind) -> Media:
    """The file whose samples, pixels or frames are this array."""
    return Media(
        kind=kind,
        param="media",
        digest=sha256(array.tobytes()).digest(),
        values=array[None] if kind is MediaKind.IMAGE else array,
        rate=16000.0 if kind is MediaKind.AUDIO else 0.0,
        frame_times_s=tuple(FRAME_TIMES_S * i for i in range(len(array))) if kind is MediaKind.VIDEO else (),
    )
