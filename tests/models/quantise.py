"""A small quantiser: rewrites a plain checkpoint in each of the formats that there are, and says what its
weights then stand for.

Formulas are those of the formats' own tools, written down a second time: nothing here is imported from the
runtime.
"""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.quantise_exports import EXPORTS
from tests.models.quantise_tiles import TILED
from tests.models.quantisers import (
    GROUP,
    SQUARE,
    Round,
    Written,
    config,
    inputs,
    write_awq,
    write_channel,
    write_fp8,
    write_gptq,
    write_modelslim,
    write_packed,
    write_second,
)

Write = Callable[[Tensor, Tensor | None], Written]
# name -> how a weight is written, and quantization_config; a string instead: what modelslim calls it
FORMATS: dict[str, tuple[Write, dict[str, Any] | str]] = {
    "fp8": (lambda w, b: write_fp8(w, "dynamic"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 static": (
        lambda w, b: write_fp8(w, "static"),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 block": (
        lambda w, b: write_fp8(w, "block"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [SQUARE, SQUARE],
        },
    ),
    "ct fp8": (
        lambda w, b: write_channel(w, "float", "dynamic"),
        config("float-quantized", "float", 8, "channel", inputs("float", True)),
    ),
    "ct fp8 weights": (
        lambda w, b: write_channel(w, "float", "none"),
        config("float-quantized", "float", 8, "channel", None),
    ),
    "ct int8": (
        lambda w, b: write_channel(w, "int", "dynamic"),
        config("int-quantized", "int", 8, "channel", inputs("int", True)),
    ),
    "ct int8 static": (
        lambda w, b: write_channel(w, "int", "static"),
        config("int-quantized", "int", 8, "channel", inputs("int", False, False)),
    ),
    "ct int4": (
        lambda w, b: write_packed(w, 4, True, False),
        config("pack-quantized", "int", 4, "group", None, group_size=GROUP),
    ),
    "ct int4 zeros": (
        lambda w, b: write_packed(w, 4, False, False),
        config("pack-quantized", "int", 4, "group", None, group_size=GROUP, symmetric=False),
    ),
    "ct int8 order": (
        lambda w, b: write_packed(w, 8, True, True),
        config("pack-quantized", "int", 8, "group", None, group_size=GROUP, actorder="group"),
    ),
    "awq": (
        lambda w, b: write_awq(w),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["gate"],
        },
    ),
    "gptq": (
        lambda w, b: write_gptq(w, 4, True, False, 1),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    ),
    "gptq order": (
        lambda w, b: write_gptq(w, 4, False, True, 1),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "gptq 8 v2": (
        lambda w, b: write_gptq(w, 8, False, False, 0),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": GROUP,
            "desc_act": False,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "modelslim W8A8": (lambda w, b: write_modelslim(w, "W8A8", b), "W8A8"),
    "modelslim W8A8_DYNAMIC": (lambda w, b: write_modelslim(w, "W8A8_DYNAMIC", b), "W8A8_DYNAMIC"),
    "modelslim W4A8_DYNAMIC": (lambda w, b: write_modelslim(w, "W4A8_DYNAMIC", b), "W4A8_DYNAMIC"),
    "modelslim W4A8 groups": (write_second, "W4A8_DYNAMIC"),
    **EXPORTS,
    **TILED,
}


def quantise(plain: Path, folder: Path, name: str, leave: tuple[str, ...] = ()) -> dict[str, Round]:
    """Writes folder/"quantised", and folder/"meant": the plain checkpoint that it stands for. -> what each
    module does to its input.

    Modules whose names contain one of `leave` stay plain.
    """
    write, settings = FORMATS[name]
    tensors, rounds = load_file(plain / "model.safetensors"), {}
    written, meant, kinds = dict(tensors), dict(tensors), {}
    for key, weight in tensors.items():
        module = key.removesuffix(".weight")
        if not module.endswith(("_proj", "_proj_with_mqa")) or any(word in module for word in leave):
            kinds[key] = "FLOAT"
            continue
        one = write(weight.float(), tensors.get(module + ".bias"))
        del written[key]
        written |= {f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in one.tensors.items()}
        if "quant_bias" in one.tensors:
            written.pop(module + ".bias", None)
        if one.bias is not None:
            meant[module + ".bias"] = one.bias
        meant[key] = one.means
        rounds[module], kinds[key] = one.rounds, settings
    for index, content in (("quantised", written), ("meant", meant)):
        copytree(plain, folder / index)
        save_file(content, folder / index / "model.safetensors", metadata={"format": "pt"})
    if isinstance(settings, str):
        extra = {"group_size": GROUP} if "groups" in name else {}
        (folder / "quantised" / "quant_model_description.json").write_text(
            json.dumps(kinds | extra | {"model_quant_type": settings})
        )
    else:
        raw = json.loads((folder / "quantised" / "config.json").read_text())
        (folder / "quantised" / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    return rounds
