"""Tiny random checkpoints of models whose images and sounds transformers' own code prepares and encodes, with
their processors, and what transformers generates of them."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models import (
    glm46v,
    glm_ocr,
    glmasr,
    idefics2,
    llava_next,
    ovis2,
    paddleocr_vl,
    paligemma,
    siglip,
    whisper,
)
from transformers.utils import is_torchvision_available

from runtime.text.transformers_process import leave_out_videos
from tests.models.make import SIZES, randomize, write_tokenizer
from tests.models.make_media import name_placeholder

if not is_torchvision_available():
    leave_out_videos()

FIRST_ID = 255  # of the tokens that a family names; the next is 254
LLAMA = SIZES | {"model_type": "llama"}
QWEN2 = SIZES | {"model_type": "qwen2"}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": None}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
CLIP = TOWER | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
SIDES = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Processed:
    """A family of models."""

    tokens: tuple[str, ...]  # the texts that it has tokens for; the first is the placeholder
    config: Callable[[], PreTrainedConfig]
    model: Callable[[PreTrainedConfig], PreTrainedModel]
    processor: Callable[[Any], ProcessorMixin]  # of a tokenizer
    named: tuple[tuple[str, str], ...] = ()  # names of tokens in tokenizer_config.json
    seed: int = 0
    least_files: int = 0  # fewest and most that its processor takes in a prompt of these tests
    most_files: int = 2

    def make(self, folder: Path) -> PreTrainedModel:
        """Writes a model and its processor. -> transformers' model of it"""
        torch.manual_seed(self.seed)
        model = randomize(self.model(self.config()).eval())
        model.save_pretrained(folder)
        write_tokenizer(folder)
        for place, text in enumerate(self.tokens):
            name_placeholder(folder, text, "", FIRST_ID - place)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(self.named)))
        self.processor(AutoTokenizer.from_pretrained(folder)).save_pretrained(folder)
        return model


def greedy_processed(
    folder: Path, model: PreTrainedModel, text: str, files: Sequence[np.ndarray], count: int
) -> tuple[list[int], int]:
    """What transformers generates of a text with one placeholder a file, all of it by its own processor, and
    how many tokens the prompt has."""
    processor = AutoProcessor.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, for what processors do with tensors
        inputs = _inputs(processor, text, files)
    inputs.pop("labels", None)
    length = inputs["input_ids"].shape[1]
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, length:].tolist(), length


def _inputs(processor: Any, text: str, files: Sequence[np.ndarray]) -> Any:
    if not files:
        return processor.tokenizer([text], return_tensors="pt")
    if files[0].ndim == 1:
        return processor(text=[text], audio=list(files), return_tensors="pt")
    return processor(text=[text], images=[Image.fromarray(one) for one in files], return_tensors="pt")


def _idefics2() -> PreTrainedConfig:
    latents = {"hidden_size": 64, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4}
    return idefics2.Idefics2Config(
        vision_config=TOWER | {"image_size": 24, "patch_size": 4},
        perceiver_config=latents | {"resampler_head_dim": 8, "num_key_value_heads": 2},
        text_config=MISTRAL,
        image_token_id=FIRST_ID,
    )


def _ovis2() -> PreTrainedConfig:
    return ovis2.Ovis2Config(
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "hidden_stride": 2, "vocab_size": 40},
        text_config=QWEN2,
        image_token_id=FIRST_ID - 1,
        visual_indicator_token_ids=[FIRST_ID - place for place in range(2, 7)],
        hidden_size=64,
        vocab_size=SIZES["vocab_size"],
        tie_word_embeddings=False,
    )


GLM_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "image_size": 20,
    "patch_size": 4,
    "out_hidden_size": 64,
}


def _glm_ocr() -> PreTrainedConfig:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    return glm_ocr.GlmOcrConfig(
        vision_config=GLM_TOWER,
        text_config=SIZES | {"head_dim": 16, "rope_parameters": rope},
        image_token_id=FIRST_ID,
        video_token_id=FIRST_ID - 1,
    )


def _glm46v() -> PreTrainedConfig:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return glm46v.Glm46VConfig(
        vision_config=GLM_TOWER | {"model_type": "glm4v_vision"},
        text_config=SIZES | {"model_type": "glm4v_text", "rope_parameters": rope},
        image_token_id=FIRST_ID,
        video_token_id=FIRST_ID - 1,
    )


def _paddleocr_vl() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return paddleocr_vl.PaddleOCRVLConfig(
        vision_config=TOWER | {"image_size": 20, "patch_size": 4},
        text_config=SIZES | {"rope_parameters": rope, "head_dim": 16},
        image_token_id=FIRST_ID,
        video_token_id=FIRST_ID - 1,
    )


PINPOINTS = [[16, 32], [32, 16], [32, 32]]
FAMILIES: dict[str, Processed] = {
    "ovis 2": Processed(
        ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        _ovis2,
        ovis2.Ovis2ForConditionalGeneration,
        lambda tokenizer: ovis2.Ovis2Processor(
            ovis2.Ovis2ImageProcessorPil(size=SIDES, crop_to_patches=True, max_patches=4),
            tokenizer,
            image_seq_length=4,
        ),
    ),
    "llava-next": Processed(
        ("<image>",),
        lambda: llava_next.LlavaNextConfig(
            vision_config=CLIP, text_config=LLAMA, image_token_index=FIRST_ID, image_grid_pinpoints=PINPOINTS
        ),
        llava_next.LlavaNextForConditionalGeneration,
        lambda tokenizer: llava_next.LlavaNextProcessor(
            llava_next.LlavaNextImageProcessorPil(
                size={"shortest_edge": 16}, crop_size=SIDES, image_grid_pinpoints=PINPOINTS
            ),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "idefics 2": Processed(
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
        _idefics2,
        idefics2.Idefics2ForConditionalGeneration,
        lambda tokenizer: idefics2.Idefics2Processor(
            idefics2.Idefics2ImageProcessorPil(size={"shortest_edge": 12, "longest_edge": 24}),
            tokenizer,
            image_seq_len=5,
        ),
    ),
}
GRIDS: dict[str, Processed] = {  # whose tokens have positions of frame, row and column
    "glm-4.6v": Processed(
        ("<|image|>", "<|video|>"),
        _glm46v,
        glm46v.Glm46VForConditionalGeneration,
        lambda tokenizer: glm46v.Glm46VProcessor(
            glm46v.Glm46VImageProcessorPil(patch_size=4, size={"shortest_edge": 512, "longest_edge": 5120}),
            tokenizer,
        ),
    ),
    "paddleocr-vl": Processed(
        ("<|IMAGE_PLACEHOLDER|>", "<|video|>"),
        _paddleocr_vl,
        paddleocr_vl.PaddleOCRVLForConditionalGeneration,
        lambda tokenizer: paddleocr_vl.PaddleOCRVLProcessor(
            paddleocr_vl.PaddleOCRVLImageProcessorPil(
                patch_size=4, size={"shortest_edge": 256, "longest_edge": 2560}
            ),
            tokenizer,
        ),
        named=(("image_token", "<|IMAGE_PLACEHOLDER|>"),),
    ),
}
GRIDS["glm-ocr"] = replace(GRIDS["glm-4.6v"], config=_glm_ocr, model=glm_ocr.GlmOcrForConditionalGeneration)
PREFIX = Processed(
    ("<image>",),
    lambda: paligemma.PaliGemmaConfig(
        vision_config=SIGLIP | {"vision_use_head": False},
        projection_dim=64,
        text_config=SIZES | {"model_type": "gemma", "head_dim": 16, "vocab_size": 1500},
        image_token_index=FIRST_ID,
    ),
    paligemma.PaliGemmaForConditionalGeneration,
    lambda tokenizer: paligemma.PaliGemmaProcessor(
        siglip.SiglipImageProcessorPil(size=SIDES, image_seq_length=16), tokenizer
    ),
    least_files=1,
)
SOUNDS: dict[str, Processed] = {
    "glm-asr": Processed(
        ("<|pad|>",),
        lambda: glmasr.GlmAsrConfig(
            audio_config=TOWER
            | {"intermediate_size": 128, "num_mel_bins": 8, "max_position_embeddings": 1500},
            text_config=LLAMA,
            audio_token_id=FIRST_ID,
        ),
        glmasr.GlmAsrForConditionalGeneration,
        lambda tokenizer: glmasr.GlmAsrProcessor(
            whisper.WhisperFeatureExtractor(feature_size=8, chunk_length=2), tokenizer
        ),
        named=(("pad_token", "<|endoftext|>"),),
        most_files=1,
    )
}
