"""What config.json, modelslim's description and --quantization say of a checkpoint's modules, as a table of
cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config.cache_scales import read_cache_scales
from runtime.models.config.quantization_config import read_quantization
from runtime.models.config.quantization_schemes import Fp8, Full, Int8, PackedInt, Scheme
from tests.models.quantisers import config, inputs

PROJ, EXPERT, GATE = "layers.3.self_attn.q_proj", "layers.3.mlp.experts.7.down_proj", "layers.3.mlp.gate"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
QUARK_WEIGHT = {"dtype": "int8", "qscheme": "per_channel"}


def scheme(given: dict[str, Any], module: str, folder: Path, requested: str | None = None) -> Scheme | None:
    found = read_quantization(folder, given, requested)
    assert found is not None
    format = found.format_of(module)
    return None if format is None else format.scheme


@pytest.mark.parametrize(
    ("given", "module", "expected"),
    [
        (AWQ, PROJ, PackedInt(4, 128, has_zero_points=True)),
        (AWQ | {"modules_to_not_convert": ["gate"]}, GATE, None),
        (
            AWQ | {"modules_to_not_convert": ["gate"]},
            "layers.3.mlp.gate_proj",
            PackedInt(4, 128, has_zero_points=True),
        ),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, PROJ, None),
        (GPTQ, EXPERT, PackedInt(4, 128, has_zero_points=True)),
        (
            GPTQ | {"desc_act": True, "group_size": -1, "bits": 8},
            PROJ,
            PackedInt(8, 0, has_zero_points=True, has_g_idx=True),
        ),
        (GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}}, PROJ, None),
        (GPTQ | {"checkpoint_format": "marlin"}, EXPERT, PackedInt(4, 128)),
        (GPTQ | {"is_marlin_format": True, "group_size": -1}, PROJ, PackedInt(4, 0)),
        ({"quant_method": "qoq", "wbits": 4, "group_size": 128}, PROJ, Int8()),
        (FP8, PROJ, Fp8()),
        (FP8 | {"activation_scheme": "static"}, PROJ, Fp8(activations="tensor")),
        (FP8 | {"weight_block_size": [128, 128]}, EXPERT, Fp8(group_size=128)),
        (FP8 | {"modules_to_not_convert": ["model.layers.3.self_attn.q_proj"]}, PROJ, None),
        (FP8 | {"ignored_layers": ["model.layers.3"]}, PROJ, None),
        (FP8 | {"ignored_layers": ["model.layers.3"]}, "layers.30.self_attn.q_proj", Fp8()),
        (config("int-quantized", "int", 8, "channel", inputs("int", True)), PROJ, Int8()),
        (config("int-quantized", "int", 8, "channel", inputs("int", True)), GATE, None),
        (config("int-quantized", "int", 8, "tensor", inputs("int", False)), PROJ, Int8("tensor")),
        (
            config("float-quantized", "float", 8, "block", inputs("float", True), block_structure=[128, 128]),
            PROJ,
            Fp8(group_size=128),
        ),
        (config("pack-quantized", "int", 4, "channel", None), PROJ, PackedInt(4, 0)),
        (
            config("pack-quantized", "int", 4, "group", None, group_size=32, actorder="weight"),
            PROJ,
            PackedInt(4, 32),
        ),
        (
            config("pack-quantized", "int", 8, "group", None, group_size=32, actorder="group"),
            PROJ,
            PackedInt(8, 32, has_g_idx=True),
        ),
    ],
)
def test_modules(given: dict[str, Any], module: str, expected: Scheme | None, tmp_path: Path) -> None:
    assert scheme(given, module, tmp_path) == expected


def test_named_groups_come_before_the_one_for_all(tmp_path: Path) -> None:
    given = config("int-quantized", "int", 8, "channel", inputs("int", True))
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    special = {"targets": ["re:.*down_proj"], "weights": weights, "format": "float-quantized"}
    given["config_groups"]["group_1"] = special
    assert (
        scheme(given, EXPERT, tmp_path) == Fp8(activations="none") and scheme(given, PROJ, tmp_path) == Int8()
    )


def test_gptq_may_have_other_bits_for_some_modules(tmp_path: Path) -> None:
    given = GPTQ | {"dynamic": {"-:.*experts.*": {}, "+:.*_proj": {"bits": 8, "group_size": -1}}}
    assert scheme(given, EXPERT, tmp_path) is None
    assert scheme(given, PROJ, tmp_path) == PackedInt(8, 0, has_zero_points=True)


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.gate"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields}))
    found = read_quantization(tmp_path, None, "modelopt_fp4")
    assert found is not None and found.format_of(GATE) is None
    one = found.format_of(PROJ)
    assert one is not None and one.scheme == Fp8(16, "none") and one.layout == "nvfp4"


def test_modelopt_may_mix(tmp_path: Path) -> None:
    layers = {f"model.{PROJ}": {"quant_algo": "FP8"}, f"model.{EXPERT}": {"quant_algo": "NVFP4"}}
    given = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = [scheme(given, name, tmp_path) for name in (PROJ, EXPERT, GATE)]
    assert found == [Fp8(activations="tensor"), Fp8(16, "none"), None]


def test_floats_that_a_device_lacks_are_dequantised(tmp_path: Path) -> None:
    found = read_quantization(tmp_path, FP8, None)
    assert found is not None and found.on_device(("fp8",)) == found
    held = found.on_device(("int8",))
    one = held.format_of(PROJ)
    assert one is not None and one.scheme == Full() and one.stored == Fp8() and held.schemes == ()
    online = read_quantization(tmp_path, None, "fp8")
    assert online is not None and online.on_device(("int8",)).schemes == ("fp8",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8wo", PackedInt(8, 0)),
        ("int8dq", Int8()),
        ("int4wo-128", PackedInt(4, 128, has_half_scales=True)),
        ("fp8wo", Fp8(activations="none")),
        ("fp8dq-per_row", Fp8()),
    ],
)
def test_words_of_torchao(name: str, expected: Scheme, tmp_path: Path) -> None:
    found = read_quantization(tmp_path, None, "torchao:" + name)
    assert found is not None and found.is_online and found.method == "torchao " + name
    one = found.format_of(PROJ)
    assert one is not None and one.scheme == expected and found.format_of("lm_head") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("fp8dq-per_tensor", "choose fp8dq-per_row"), ("int4wo-7", "int4wo-32"), ("gemlite-8-4-64", "int8wo")],
)
def test_words_of_torchao_that_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_quantization(tmp_path, None, "torchao:" + name)
    with pytest.raises(ModelError, match="quantised by fp8 already"):
        read_quantization(tmp_path, FP8, "torchao:" + name)


def test_scales_of_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"

    def write(scales: dict[str, Any], dtype: str = "float8_e4m3fn") -> str:
        path.write_text(
            json.dumps({"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": scales}})
        )
        return str(path)

    good = {"0": {"0": 0.5, "1": 2}, "1": {"1": 3, "0": 1}}
    assert read_cache_scales(write(good), 2, 2) == ((0.5, 2.0), (1.0, 3.0))
    for scales, dtype, words in (
        (good, "int8", "int8"),
        ({"0": good["0"]}, "float8_e4m3fn", "each of 2 layers on each of 2 ranks"),
        (good | {"1": {"0": 1}}, "float8_e4m3fn", "each of 2 layers"),
    ):
        with pytest.raises(ModelError, match=words):
            read_cache_scales(write(scales, dtype), 2, 2)
    with pytest.raises(ModelError, match="positive"):
        read_cache_scales(write({"0": {"0": 0}}), 1, 1)
    with pytest.raises(ModelError, match="cannot be read"):
        read_cache_scales(str(tmp_path / "none.json"), 1, 1)


def test_modelslim_names_each_module(tmp_path: Path) -> None:
    names = {
        f"model.{PROJ}.weight": "W8A8",
        f"model.{PROJ}.quant_bias": "W8A8",
        f"model.{EXPERT}.weight": "W4A8_DYNAMIC",
        f"model.{GATE}.weight": "FLOAT",
        "lm_head.weight": "FLOAT",
        "model_quant_type": "W8A8",
        "group_size": 256,
    }
    (tmp_path / "quant_model_description.json").write_text(json.dumps(names))
    found = read_quantization(tmp_path, None, "modelslim")
    assert found is not None and found.schemes == ("int4_int8", "int8_static")
    assert [
        None if (one := found.format_of(name)) is None else one.scheme
        for name in (PROJ, EXPERT, GATE, "lm_head")
    ] == [Int8("tensor"), PackedInt(4, 256, activations="token"), None, None]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "hqq"}, ["hqq", "unquantised"]),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ["modelopt", "W4A8_AWQ"]),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}},
            },
            ["torchao", "Int4WeightOnlyConfig"],
        ),
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "neither"]),
        (AWQ | {"version": "gemv"}, ["awq", "gemv"]),
        (GPTQ | {"lm_head": True}, ["gptq", "lm_head"]),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 5}}}, ["5 bits"]),
        (GPTQ | {"checkpoint_format": "marlin", "bits": 8}, ["marlin", "8 bits"]),
        ({"quant_method": "qoq", "wbits": 4, "group_size": 64}, ["qoq", "groups of 64"]),
        (FP8 | {"weight_block_size": [128, 64], "activation_scheme": "static"}, ["128, 64", "static"]),
        ({"quant_method": "compressed-tensors", "format": "x"}, ["compressed-tensors", "config_groups"]),
        (config("mxfp6-pack-quantized", "float", 6, "group", None), ["6 bits", "mxfp6"]),
        (config("int-quantized", "int", 8, "channel", inputs("int", True, False)), ["activations"]),
        (config("int-quantized", "int", 8, "group", inputs("int", True)), ["int8 weights by group"]),
    ],
)
def test_refuses(given: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_quantization(tmp_path, given, None)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("requested", "given"),
    [
        ("awq_marlin", AWQ),
        ("moe_wna16", AWQ),
        ("gptq_marlin", GPTQ),
        ("fp8", FP8),
        ("fbgemm_fp8", {"quant_method": "fbgemm_fp8"}),
        ("quark", {"quant_method": "quark", "global_quant_config": {"weight": QUARK_WEIGHT}}),
        (
            "torchao",
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
            },
        ),
        ("compressed-tensors", config("int-quantized", "int", 8, "channel", inputs("int", True))),
        ("w8a8_int8", config("int-quantized", "int", 8, "channel", inputs("int", True))),
        ("w8a8_fp8", config("float-quantized", "float", 8, "channel", inputs("float", True))),
    ],
)
def test_a_checkpoint_answers_to_its_names(requested: str, given: dict[str, Any], tmp_path: Path) -> None:
    assert scheme(given, PROJ, tmp_path, requested) is not None


@pytest.mark.parametrize(
    ("requested", "given", "words"),
    [
        ("gptq", AWQ, ["--quantization gptq", "says awq"]),
        (
            "w8a8_fp8",
            config("int-quantized", "int", 8, "channel", inputs("int", True)),
            ["w8a8_fp8", "compressed-tensors"],
        ),
        ("awq", None, ["--quantization awq", "not quantised", "fp8, w8a8_fp8, w8a8_int8"]),
    ],
)
def test_a_checkpoint_is_what_it_is(
    requested: str, given: dict[str, Any] | None, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read_quantization(tmp_path, given, requested)
    assert all(word in str(caught.value) for word in words), caught.value
