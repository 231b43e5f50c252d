"""Tiny random checkpoints of MiniCPM-V 4.6, and what transformers' processors make of images and
videos."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6Processor,
    PreTrainedModel,
)
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from tests.models.hybrids import DELTA
from tests.models.make import SIZES, randomize, write_tokenizer
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, name_placeholder
from tests.models.on_pillow import on_pillow

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
TEXT = SIZES | DELTA | {"model_type": "qwen3_5_text", "head_dim": 32}
TEXT |= {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 4,
}
# texts of tokens, by their names in the tokenizer
MARKS = {
    "image_token": ("<|image_pad|>", PLACEHOLDER),
    "video_token": ("<|video_pad|>", VIDEO_PLACEHOLDER),
    "image_start_token": ("<image>", 253),
    "image_end_token": ("</image>", 252),
    "slice_start_token": ("<slice>", 251),
    "slice_end_token": ("</slice>", 250),
    "image_id_start_token": ("<image_id>", 249),
    "image_id_end_token": ("</image_id>", 248),
}


class MiniCpmV:
    """MiniCPM-V 4.6, whose encoder joins 16 patches, or with `mode` 4x 4 of them."""

    def __init__(self, mode: str = "16x", *, has_numbers: bool = True) -> None:
        self.mode, self.has_numbers = mode, has_numbers
        self.preparation = {
            "scale_resolution": 32,
            "patch_size": 4,
            "max_slice_nums": 4,
            "downsample_mode": mode,
            "use_image_id": has_numbers,
        }

    def make(self, folder: Path) -> PreTrainedModel:
        """See Family."""
        torch.manual_seed(0)
        config = MiniCPMV4_6Config(
            vision_config=VISION,
            text_config=TEXT,
            insert_layer_id=1,
            image_token_id=PLACEHOLDER,
            video_token_id=VIDEO_PLACEHOLDER,
            downsample_mode=self.mode,
        )
        model = randomize(MiniCPMV4_6ForConditionalGeneration(config).eval())
        model.save_pretrained(folder)
        write_tokenizer(folder)
        for text, id in MARKS.values():
            name_placeholder(folder, text, "", id)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.preparation))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return model

    def prepare(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """See Family."""
        found = MiniCPMV4_6ImageProcessorPil(**self.preparation)(list(images), return_tensors="pt")
        names = mark_names()
        texts = [
            MiniCPMV4_6Processor.replace_image_token(
                names, found, index, image_token_divisor=int(self.mode[:-1])
            )
            for index in range(len(images))
        ]
        if self.has_numbers:
            texts = MiniCPMV4_6Processor._prepend_local_ids(
                names, ["<|image_pad|>" * len(images)], texts, "<|image_pad|>"
            )
        tokens = [self.tokenizer.encode(text).ids for text in texts]
        return {name: found[name] for name in ("pixel_values", "target_sizes")}, tokens

    def prepare_videos(self, videos: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """What the model is given for videos, uint8 [frames, height, width, 3], and the tokens of each."""
        processor = on_pillow("minicpmv4_6.video_processing_minicpmv4_6", "MiniCPMV4_6VideoProcessor")
        settings = {name: value for name, value in self.preparation.items() if name != "use_image_id"}
        found = processor._preprocess(
            [torch.from_numpy(video).permute(0, 3, 1, 2).contiguous() for video in videos],
            video_metadata=[None] * len(videos),
            resample=3,
            slice_mode=True,
            stack_frames=1,
            max_num_frames=128,
            image_mean=(0.5, 0.5, 0.5),
            image_std=(0.5, 0.5, 0.5),
            return_tensors="pt",
            do_resize=True,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            **settings,
        )
        names, token = mark_names(), MARKS["video_token"][0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, for sums of tensors
            texts = [
                MiniCPMV4_6Processor.replace_video_token(
                    names, found, index, video_token_divisor=int(self.mode[:-1])
                )
                for index in range(len(videos))
            ]
        if self.has_numbers:
            texts = MiniCPMV4_6Processor._prepend_local_ids(names, [token * len(videos)], texts, token)
        given = {name: found[name] for name in ("pixel_values_videos", "target_sizes_videos")}
        return given, [self.tokenizer.encode(text).ids for text in texts]


def mark_names() -> Any:
    """What a processor knows of the texts of tokens."""
    texts = {name: text for name, (text, _) in MARKS.items()}
    return SimpleNamespace(slice_mode=True, video_slice_mode=True, **texts)
