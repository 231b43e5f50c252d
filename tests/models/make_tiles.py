"""Tiny random checkpoints of models whose images are square tiles with marks between them, and what
transformers' processors make of images: Llama 4, DeepSeek-VL, Aya Vision, Command A Vision, Idefics 3."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.image_utils import SizeDict
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.video_utils import VideoMetadata

from tests.models.make import FAMILIES, SIZES, randomize, write_tokenizer
from tests.models.make_gemma_vision import SIGLIP
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER, name_placeholder
from tests.models.on_pillow import on_pillow, prepared

ROW, START, END, NEXT, NEXT_ROW = 254, 253, 252, 251, 250  # bytes that no text of these tests has
EDGE = 12
TOWER = SIGLIP | {"image_size": EDGE}  # 4 x 4 patches
SIZE = {"height": EDGE, "width": EDGE}
HALVES = (0.5, 0.5, 0.5)
COHERE = SIZES | FAMILIES["cohere2"][1] | {"model_type": "cohere2"}
NUMBER_WORDS = {2: "two", 3: "three"}  # of num2words, which transformers takes them from
Prepared = tuple[dict[str, Any], list[list[int]]]  # arguments of the model, and the tokens of each image


class TileModel(ABC):
    """One of these models. `own`: further fields of config.json."""

    architecture: str
    kind: str  # of its configuration
    preparation: dict[str, Any]  # preprocessor_config.json
    marks: dict[str, int]  # texts of tokens
    vision: dict[str, Any] = TOWER
    text: dict[str, Any] = SIZES | {"model_type": "llama"}
    seed = 0

    def __init__(self, **own: Any) -> None:
        self.own = own

    def make(self, folder: Path) -> PreTrainedModel:
        """See Family."""
        torch.manual_seed(self.seed)
        config = getattr(transformers, self.kind)(
            vision_config=self.vision, text_config=self.text, tie_word_embeddings=False, **self.own
        )
        model = randomize(getattr(transformers, self.architecture)(config).eval())
        model.save_pretrained(folder)
        write_tokenizer(folder)
        for text, id in self.marks.items():
            name_placeholder(folder, text, "", id)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.preparation))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return model

    def prepare(self, images: Sequence[np.ndarray]) -> Prepared:
        """See Family."""
        given, texts = self.processed(images)
        return given, [self.tokenizer.encode(text).ids for text in texts]

    @abstractmethod
    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        """The model's arguments for images, and the text of each."""


class Llama4(TileModel):
    architecture, kind = "Llama4ForConditionalGeneration", "Llama4Config"
    preparation: dict[str, Any] = {"size": {"height": 16, "width": 16}, "max_patches": 6}
    marks = {
        "<|image|>": PLACEHOLDER,
        "<|patch|>": ROW,
        "<|image_start|>": START,
        "<|image_end|>": END,
        "<|tile_x_separator|>": NEXT,
        "<|tile_y_separator|>": NEXT_ROW,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "image_size": 16,
        "patch_size": 4,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
        "vision_output_dim": 48,
    }
    text = SIZES | FAMILIES["llama4"][1]

    def __init__(self) -> None:
        super().__init__(image_token_index=ROW)

    def make(self, folder: Path) -> PreTrainedModel:
        # the whole model of transformers 5.24 reads this of its text model's output, which has it not
        MoeCausalLMOutputWithPast.image_outputs = None
        return super().make(folder)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        processor = on_pillow("llama4.image_processing_llama4", "Llama4ImageProcessor")
        found = prepared(
            processor,
            images,
            size=SizeDict(height=16, width=16),
            resample=2,
            image_mean=list(HALVES),
            image_std=list(HALVES),
            max_patches=6,
            resize_to_max_canvas=self.preparation.get("resize_to_max_canvas", False),
        )
        texts = [
            transformers.Llama4Processor._prompt_split_image(None, ratio.tolist(), 4)
            for ratio in found["aspect_ratios"]
        ]
        return {"pixel_values": torch.cat(list(found["pixel_values"])).float()}, texts


class LargestCanvas(Llama4):
    preparation = Llama4.preparation | {"resize_to_max_canvas": True}


class DeepSeekVl(TileModel):
    architecture, kind = "DeepseekVLForConditionalGeneration", "DeepseekVLConfig"
    preparation: dict[str, Any] = {"size": SIZE, "min_size": 3}
    marks = {"<image_placeholder>": PLACEHOLDER}

    def __init__(self) -> None:
        super().__init__(image_token_id=PLACEHOLDER)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        found = DeepseekVLImageProcessorPil(**self.preparation)(list(images), return_tensors="pt")
        return {"pixel_values": found["pixel_values"]}, ["<image_placeholder>" * 16] * len(images)


class DeepSeekVlHybrid(TileModel):
    architecture, kind = "DeepseekVLHybridForConditionalGeneration", "DeepseekVLHybridConfig"
    preparation: dict[str, Any] = {
        "size": SIZE,
        "min_size": 3,
        "high_res_size": {"height": 32, "width": 32},
        "high_res_image_mean": [0.4, 0.5, 0.6],
        "high_res_image_std": [0.3, 0.2, 0.25],
    }
    marks = {"<image_placeholder>": PLACEHOLDER}
    sam = {
        "hidden_size": 16,
        "output_channels": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
        "mlp_dim": 24,
        "window_size": 3,
        "global_attn_indexes": [1],
    }

    def __init__(self) -> None:
        super().__init__(image_token_id=PLACEHOLDER, high_res_vision_config=self.sam)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        found = DeepseekVLHybridImageProcessorPil(**self.preparation)(list(images), return_tensors="pt")
        given = {name: found[name] for name in ("pixel_values", "high_res_pixel_values")}
        return given, ["<image_placeholder>" * 16] * len(images)


class AyaVision(TileModel):
    seed = 1  # answers depend on images
    architecture, kind = "AyaVisionForConditionalGeneration", "AyaVisionConfig"
    preparation: dict[str, Any] = {"size": SIZE, "max_patches": 4}
    marks = {"<image>": PLACEHOLDER, "<|IMG_PATCH|>": ROW, "<|START_OF_IMG|>": START, "<|END_OF_IMG|>": END}
    text = COHERE

    def __init__(self) -> None:
        super().__init__(image_token_index=ROW)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        found = GotOcr2ImageProcessorPil(**self.preparation, crop_to_patches=True)(
            list(images), return_tensors="pt"
        )
        names = SimpleNamespace(
            img_size=EDGE,
            patch_size=6,
            start_of_img_token="<|START_OF_IMG|>",
            end_of_img_token="<|END_OF_IMG|>",
            img_patch_token="<|IMG_PATCH|>",
            tile_token="TILE",
            tile_global_token="TILE_GLOBAL",
        )
        texts = [
            transformers.AyaVisionProcessor.replace_image_token(names, found, index)
            for index in range(len(images))
        ]
        return {"pixel_values": found["pixel_values"]}, texts


class Cohere2Vision(TileModel):
    architecture, kind = "Cohere2VisionForConditionalGeneration", "Cohere2VisionConfig"
    preparation: dict[str, Any] = {"size": SIZE, "max_patches": 4}
    marks = {
        "<|IMG_PATCH|>": PLACEHOLDER,
        "<|START_OF_IMG|>": START,
        "<|END_OF_IMG|>": END,
        "<|IMG_LINE_BREAK|>": NEXT,
    }
    text = COHERE

    def __init__(self) -> None:
        super().__init__(image_token_id=PLACEHOLDER, alignment_intermediate_size=40)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        module = "cohere2_vision.image_processing_cohere2_vision"
        processor = on_pillow(module, "Cohere2VisionImageProcessor")
        found = prepared(
            processor,
            images,
            size=SizeDict(**SIZE),
            resample=3,
            image_mean=(0.48145466, 0.4578275, 0.40821073),
            image_std=(0.26862954, 0.26130258, 0.27577711),
            crop_to_patches=True,
            max_patches=4,
        )
        names = SimpleNamespace(
            patch_size=2,
            image_token="<|IMG_PATCH|>",
            boi_token="<|START_OF_IMG|>",
            eoi_token="<|END_OF_IMG|>",
            img_line_break_token="<|IMG_LINE_BREAK|>",
        )
        texts = [
            transformers.Cohere2VisionProcessor.replace_image_token(names, found, index)
            for index in range(len(images))
        ]
        return {"pixel_values": torch.stack(list(found["pixel_values"]))}, texts


class Idefics3(TileModel):
    seed = 2  # no answer has the placeholder
    architecture, kind = "Idefics3ForConditionalGeneration", "Idefics3Config"
    preparation: dict[str, Any] = {"size": {"longest_edge": 24}, "max_image_size": {"longest_edge": EDGE}}
    marks = {"<image>": PLACEHOLDER, "<fake_token_around_image>": START}
    vision = {name: value for name, value in TOWER.items() if name not in ("model_type", "vision_use_head")}

    def __init__(self) -> None:
        super().__init__(image_token_id=PLACEHOLDER)

    def processed(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
        found = Idefics3ImageProcessorPil(**self.preparation, return_row_col_info=True)(
            [list(images)], return_tensors="pt"
        )
        names = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            global_image_tag="<global-img>",
            image_token="<image>",
            image_seq_len=4,
        )
        texts = [
            transformers.Idefics3Processor.replace_image_token(names, found, index)
            for index in range(len(images))
        ]
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}, texts


class SmolVlm(Idefics3):
    seed = 1  # no answer has the placeholder
    architecture, kind = "SmolVLMForConditionalGeneration", "SmolVLMConfig"
    preparation = Idefics3.preparation | {"do_image_splitting": False}
    marks = Idefics3.marks | {"<video>": VIDEO_PLACEHOLDER}

    def prepare_video(self, video: np.ndarray, rate: float, indices: Sequence[int]) -> tuple[Any, str]:
        """Pixels of the frames of a video, uint8 [frames, height, width, 3], and the text that stands for it.
        `indices`: which of the file's frames they are, at this rate, the last one of the file among them."""
        module = "smolvlm.video_processing_smolvlm"
        processor = on_pillow(module, "SmolVLMVideoProcessor", replaces_own=False)
        processor.max_image_size = self.preparation["max_image_size"]
        found = processor._preprocess(
            [torch.from_numpy(video).permute(0, 3, 1, 2).contiguous()],
            size=SizeDict(**self.preparation["size"]),
            resample=1,
            do_resize=True,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            do_pad=True,
            image_mean=HALVES,
            image_std=HALVES,
            return_tensors="pt",
        )
        metadata = VideoMetadata(
            total_num_frames=indices[-1] + 1,
            fps=rate,
            duration=(indices[-1] + 1) / rate,
            frames_indices=list(indices),
        )
        names = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            global_image_token="<global-img>",
            image_token="<image>",
            image_seq_len=4,
        )
        pixels = found["pixel_values"]
        inputs = {"pixel_values": pixels, "video_metadata": [metadata]}
        with patch("transformers.models.smolvlm.processing_smolvlm.num2words", NUMBER_WORDS.__getitem__):
            return pixels, transformers.SmolVLMProcessor.replace_video_token(names, inputs, 0)
