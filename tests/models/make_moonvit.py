"""Tiny random checkpoints of Kimi K2.5, and of Kimi-VL, which is another layout of it that transformers has
not; and what transformers' processor makes of images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration, PreTrainedModel
from transformers.image_utils import SizeDict

from tests.models.make import FAMILIES, SIZES, randomize, write_tokenizer
from tests.models.make_media import PLACEHOLDER, VIDEO_PLACEHOLDER
from tests.models.on_pillow import on_pillow, prepared

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
# names of the numbers of vision_config in the files of Kimi-VL, and in those of Kimi K2.5
KIMI_VL = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
KIMI_K25 = KIMI_VL | {
    name: f"vt_{name}"
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
}
LIMITS = {"max_patches": 60, "max_side": 20}


class Kimi:
    """Kimi K2.5 as transformers writes it, or in one of the two layouts that its makers publish."""

    def __init__(self, layout: str = "transformers") -> None:
        self.layout = layout

    def make(self, folder: Path) -> PreTrainedModel:
        """See Family."""
        torch.manual_seed(0)
        text = SIZES | FAMILIES["deepseek_v3"][1] | {"model_type": "deepseek_v3"}
        config = Kimi_K25Config(
            vision_config=VISION,
            text_config=text,
            image_token_id=PLACEHOLDER,
            video_token_id=VIDEO_PLACEHOLDER,
            projection_hidden_size=32,
            tie_word_embeddings=False,
        )
        model = randomize(Kimi_K25ForConditionalGeneration(config).eval())
        model.save_pretrained(folder)
        write_tokenizer(folder)
        preparation: dict[str, Any] = {"max_patches": 60, "size": {"max_height": 20, "max_width": 20}}
        preparation |= {"patch_size": 4}
        if self.layout == "kimi-vl":
            preparation = {"in_token_limit": 60, "patch_size": 4, "pad_input": True}
            preparation |= {"merge_kernel_size": [2, 2], "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            as_published(folder, "KimiVLForConditionalGeneration", KIMI_VL)
            rename(
                folder,
                ("mm_projector.proj.0.", "multi_modal_projector.linear_1."),
                ("mm_projector.proj.2.", "multi_modal_projector.linear_2."),
                ("mm_projector.pre_norm.", "multi_modal_projector.pre_norm."),
            )
        if self.layout == "kimi k2.5":
            own = {"in_patch_limit": 60, "patch_limit_on_one_side": 20, "patch_size": 4}
            preparation = {"media_proc_cfg": own | {"merge_kernel_size": 2, "fixed_output_tokens": None}}
            as_published(folder, "KimiK25ForConditionalGeneration", KIMI_K25)
        (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
        return model

    def prepare(self, images: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
        """See Family."""
        found = prepared(
            on_pillow("kimi_k25.image_processing_kimi_k25", "Kimi_K25ImageProcessor"),
            images,
            size=SizeDict(max_height=20, max_width=20),
            resample=3,
            image_mean=(0.5, 0.5, 0.5),
            image_std=(0.5, 0.5, 0.5),
            patch_size=4,
            merge_size=2,
            max_patches=60,
        )
        grids = found["image_grid_thw"]
        tokens = [[PLACEHOLDER] * (count // 4) for count in grids.prod(dim=1).tolist()]
        return {"pixel_values": found["pixel_values"], "image_grid_thw": grids}, tokens


def as_published(folder: Path, architecture: str, names: dict[str, str]) -> None:
    """Writes config.json and names as the makers of these models do."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    vision = {names.get(name, name): value for name, value in VISION.items()}
    fields |= {"architectures": [architecture], "vision_config": vision}
    fields["media_placeholder_token_id"] = fields.pop("image_token_id")
    if "vt_hidden_size" in vision:
        fields["text_config"]["model_type"] = "kimi_k2"
        vision |= {"projector_ln_eps": fields.pop("projection_layer_norm_eps"), "pos_emb_type": None}
    path.write_text(json.dumps(fields))

    rename(
        folder,
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    )


def rename(folder: Path, *names: tuple[str, str]) -> None:
    """Gives the tensors of a checkpoint other names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in names:
        assert any(old in name for name in tensors), old
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
