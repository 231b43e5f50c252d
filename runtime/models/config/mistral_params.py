"""params.json, the configuration that Mistral AI publishes with consolidated.safetensors, as config.json
would say it."""

from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields

PARAMS_FILE = "params.json"
BOS_ID, EOS_ID = 1, 2  # of all of Mistral AI's tokenizers
CONTEXT = 128_000  # where the file has no length, as vLLM takes it
# what a model may have besides that this reader does not know
UNKNOWN = ("moe", "quantization", "q_lora_rank", "kv_lora_rank", "yarn", "llama_4_scaling", "vision_encoder")


class Params(Struct, frozen=True, kw_only=True):
    """The part of params.json that is read here."""

    dim: int
    n_layers: int
    hidden_dim: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    sliding_window: int | None = None
    tied_embeddings: bool = False
    max_position_embeddings: int | None = None
    max_seq_len: int | None = None


def config_of_params(params: Params, given: Fields) -> tuple[Fields, Fields]:
    """What config.json and generation_config.json would say. `given`: the whole file. Raises ModelError for a
    model that has more than that."""
    if unknown := [name for name in UNKNOWN if given.get(name)]:
        raise ModelError(
            f"{PARAMS_FILE} has {', '.join(unknown)}, which is read from config.json alone; take the "
            "model in Hugging Face layout"
        )
    config: Fields = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": params.dim,
        "num_hidden_layers": params.n_layers,
        "intermediate_size": params.hidden_dim,
        "num_attention_heads": params.n_heads,
        "num_key_value_heads": params.n_kv_heads or params.n_heads,
        "vocab_size": params.vocab_size,
        "head_dim": params.head_dim or params.dim // params.n_heads,
        "rms_norm_eps": params.norm_eps,
        "rope_theta": params.rope_theta,
        "sliding_window": params.sliding_window,
        "tie_word_embeddings": params.tied_embeddings,
        "max_position_embeddings": params.max_position_embeddings or params.max_seq_len or CONTEXT,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "bfloat16",
    }
    return config, {"eos_token_id": EOS_ID}
