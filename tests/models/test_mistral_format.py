"""Mistral AI's own layout: the same weights in it and in Hugging Face's give the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.config.config_files import decode
from runtime.models.config.mistral_params import Params, config_of_params
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, start
from tests.models.compare import expected_of, in_company, random_prompts
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.test_wrappers import greedy, make_wrapper
from tests.models.write_mistral import unstacked, write_mistral

PROMPT = random_prompts(41)[0]
NUM_TOKENS = 12
WEIGHTS = "model.safetensors"
YARN = {"factor": 16, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
SCALING = {"beta": 0.1, "original_max_position_embeddings": 16}
LARGE_3 = {  # sizes of Mistral Large 3
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "moe": {
        "expert_hidden_dim": 4096,
        "first_k_dense_replace": 3,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "route_every_n": 1,
        "routed_scale": 1.0,
    },
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}


def continued(folder: Path) -> list[int]:
    """Greedy tokens in float32: params.json says bfloat16 of all models."""
    executor, ready = start(folder, dtype="float32")
    return in_company(Planner(executor, ready, 4), [PROMPT], NUM_TOKENS, chunk=11)[0]


@pytest.mark.parametrize("family", ["mistral", "ministral3", "mistral4", "mixtral"])
def test_tokens_are_those_of_the_other_layout(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "hf")
    write_mistral(folder, tmp_path / "own")
    assert continued(tmp_path / "own") == expected_of(folder, [PROMPT], NUM_TOKENS).tokens[0]
    wanted, found = read_config(folder), read_config(tmp_path / "own")
    betas = {name: getattr(found.rope, name) for name in ("beta_fast", "beta_slow")}  # defaults, said aloud
    wanted = structs.replace(wanted, rope=structs.replace(wanted.rope, **betas))
    names = {name for name in wanted.__struct_fields__ if getattr(wanted, name) != getattr(found, name)}
    assert names <= {"eos_ids", "bos_id", "dtype", "sampling_defaults"}


def test_text_of_a_model_with_images(tmp_path: Path) -> None:
    """Mistral Small 3.1 and Ministral 3: weights of the encoder are in the same file, and are not read."""
    model = make_wrapper("Mistral3ForConditionalGeneration", tmp_path / "hf")
    write_mistral(tmp_path / "hf", tmp_path / "own")
    assert continued(tmp_path / "own") == greedy(model, PROMPT)
    assert read_config(tmp_path / "own").wrapper == "Mistral3ForConditionalGeneration"


@pytest.mark.parametrize(("format", "scheme"), [("fp8 static", "TENSOR"), ("fp8", "NO_SCALES")])
@pytest.mark.parametrize("family", ["mistral", "mistral4"])
def test_weights_in_8_bits(family: str, format: str, scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    plain = make_checkpoint(family, tmp_path / "plain", **sizes)
    one_by_one = {name: one.clone() for name, one in unstacked(load_file(plain / WEIGHTS)).items()}
    save_file(one_by_one, plain / WEIGHTS)
    quantise(plain, tmp_path / "hf", format)
    folder = tmp_path / "hf" / "quantised"
    write_mistral(
        folder, tmp_path / "own", quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    )
    assert read_config(tmp_path / "own").quantization is not None
    assert continued(tmp_path / "own") == continued(folder)


def test_large_3_is_latent_with_experts(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(LARGE_3))
    config = read_config(tmp_path)
    assert config.architecture == "Mistral4ForCausalLM" and config.mla is not None and config.moe is not None
    assert (config.mla.kv_rank, config.mla.q_rank, config.moe.num_experts) == (512, 1536, 128)
    assert config.moe.layers == (False,) * 3 + (True,) * 58 and config.moe.shared_size == 4096
    assert config.position_scales[0] is not None and config.position_scales[0].interval == 8192
    assert config.context_len == 294912 and config.quantization is not None


def test_windows_in_a_pattern(tmp_path: Path) -> None:
    fields = {"dim": 64, "n_layers": 4, "hidden_dim": 96, "n_heads": 4, "vocab_size": 99}
    windows = {"[null,7]": (0, 7, 0, 7), '"9"': (9,) * 4, "8": (8,) * 4, "null": (0,) * 4}
    for given, wanted in windows.items():
        (tmp_path / "params.json").write_text(json.dumps(fields | {"sliding_window": json.loads(given)}))
        assert read_config(tmp_path).windows == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"multimodal": {"whisper_model_args": {}}}, "whisper_model_args"),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2, "route_every_n": 2}}, "moe.route_every_n"),
        (
            {"moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}},
            "num_shared_experts",
        ),
        ({"kv_lora_rank": 32}, "kv_lora_rank"),
        ({"yarn": YARN | {"apply_scale": True}}, "yarn.apply_scale"),
        (
            {"yarn": YARN, "llama_4_scaling": SCALING | {"original_max_position_embeddings": 8}},
            "llama_4_scaling",
        ),
        ({"quantization": {"qformat_weight": "int3"}}, "qformat_weight int3"),
        ({"sliding_window": "wide"}, "sliding_window 'wide'"),
        ({"sliding_window": [7, 8]}, "sliding_window"),
        ({"sliding_window": [7, None, None]}, "sliding_window"),
        ({"dim": "wide"}, "params.json"),
    ],
)
def test_what_is_not_known_is_refused(fields: dict[str, Any], message: str) -> None:
    base = {"dim": 64, "n_layers": 2, "hidden_dim": 96, "n_heads": 4, "vocab_size": 99}
    raw = json.dumps(base | fields).encode()
    with pytest.raises(ModelError, match=message):
        config_of_params(decode(raw, Params, "params.json"), base | fields)
