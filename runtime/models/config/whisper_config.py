"""config.json of Whisper (Radford et al., 2022): its decoder, and its encoder of sounds. Torch-free."""

from pathlib import Path
from typing import Annotated as A
from typing import ClassVar

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.audio_config import STRIDE
from runtime.models.config.block import ACTIVATIONS as BLOCK_ACTIVATIONS
from runtime.models.config.block import LearnedPositions
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation
from runtime.models.config.families import decoded
from runtime.models.config.family import Family
from runtime.models.config.renames import Renames
from runtime.models.config.rope_config import NO_ROPE
from runtime.regular_file import read_regular

WHISPER = "WhisperForConditionalGeneration"
DECODER_NAMES: Renames = (
    ("decoder.layer_norm.", "norm."),
    ("decoder.", ""),
    (".encoder_attn_layer_norm.", ".cross_attention_norm."),
    (".encoder_attn.q_proj.", ".cross_attention.query."),
    (".encoder_attn.k_proj.", ".cross_attention.key."),
    (".encoder_attn.v_proj.", ".cross_attention.value."),
    (".encoder_attn.out_proj.", ".cross_attention.output."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn_layer_norm.", ".input_layernorm."),
    (".final_layer_norm.", ".post_attention_layernorm."),
    (".fc1.", ".mlp.up."),
    (".fc2.", ".mlp.down."),
)


class HfWhisper(Struct, frozen=True):
    """What is read of Whisper's config.json, with the defaults of transformers."""

    d_model: sizes.Width = 384
    encoder_layers: sizes.Layers = 4
    encoder_attention_heads: sizes.Heads = 6
    encoder_ffn_dim: sizes.Width = 1536
    decoder_layers: sizes.Layers = 4
    decoder_attention_heads: sizes.Heads = 6
    decoder_ffn_dim: sizes.Width = 1536
    num_mel_bins: sizes.Width = 80
    max_source_positions: sizes.Width = 1500
    max_target_positions: sizes.Tokens = 448
    vocab_size: sizes.Tokens = 51865
    activation_function: str = "gelu"
    scale_embedding: bool = False
    decoder_start_token_id: int = 50257


class HfWhisperGeneration(Struct, frozen=True):
    """What is read of Whisper's generation_config.json."""

    suppress_tokens: list[int] | None = None  # that no text has
    is_multilingual: bool = True
    # layer and head, of the decoder's heads that follow the sound as it is spoken
    alignment_heads: list[tuple[int, int]] | None = None


class HfWhisperAlignment(HfWhisper, frozen=True):
    """What times of words need of Whisper's config.json."""

    median_filter_width: A[int, Meta(ge=1, le=99)] = 7


class WhisperEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of Whisper. The decoder attends to all that it makes of a sound in every layer, so a sound
    is encoded to one row, which has the numbers of all its positions."""

    placeholder_id: int  # the token with which an answer begins
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int  # bins of a spectrogram's frame
    num_positions: int  # of a sound, whatever its length
    activation: str  # one of ACTIVATIONS
    decoder_layers: int  # that attend to it
    has_key_bias: ClassVar[bool] = False  # keys of the tower have a bias
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.AUDIO})  # what it takes

    @property
    def max_frames(self) -> int:
        """Frames of a spectrogram."""
        return STRIDE * self.num_positions

    @property
    def output_size(self) -> int:
        """Numbers of a sound's row."""
        return self.num_positions * self.hidden_size

    @property
    def num_weights(self) -> int:
        """Numbers in all weights, with those of the decoder's attention to sounds."""
        size, inner = self.hidden_size, self.intermediate_size
        attention = 4 * size * size + 3 * size
        layer = attention + 2 * size * inner + inner + size + 4 * size
        convolutions = 3 * size * (self.num_mels + size) + 2 * size
        cross = self.decoder_layers * (attention + 2 * size)
        return convolutions + self.num_positions * size + self.num_layers * layer + 2 * size + cross


def read_whisper(raw: bytes, hidden_size: int) -> WhisperEncoder:
    """The encoder. Raises ModelError."""
    hf = decode(raw, HfWhisper, "config.json")
    check_activation("activation_function", hf.activation_function)
    if hf.d_model % hf.encoder_attention_heads:
        raise ModelError(
            f"config.json: d_model {hf.d_model} is not a multiple of encoder_attention_heads "
            f"{hf.encoder_attention_heads}; restore the file from the model's source"
        )
    return WhisperEncoder(
        placeholder_id=hf.decoder_start_token_id,
        hidden_size=hidden_size,
        intermediate_size=hf.encoder_ffn_dim,
        num_layers=hf.encoder_layers,
        num_heads=hf.encoder_attention_heads,
        num_mels=hf.num_mel_bins,
        num_positions=hf.max_source_positions,
        activation=hf.activation_function,
        decoder_layers=hf.decoder_layers,
    )


def read_whisper_generation(folder: Path) -> HfWhisperGeneration:
    """generation_config.json of a model's folder, which may be missing. Raises ModelError."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return HfWhisperGeneration()
    return decode(read_regular(path), HfWhisperGeneration, path.name)


def read_filter_width(folder: Path, heads: list[tuple[int, int]]) -> int:
    """Positions of the median filter that times of words need. Raises ModelError for `heads`, a layer and a
    head of it each, that the decoder does not have."""
    hf = decode(read_regular(folder / "config.json"), HfWhisperAlignment, "config.json")
    for layer, head in heads:
        if not (0 <= layer < hf.decoder_layers and 0 <= head < hf.decoder_attention_heads):
            raise ModelError(
                f"generation_config.json: alignment_heads has [{layer}, {head}], but the decoder has "
                f"{hf.decoder_layers} layers of {hf.decoder_attention_heads} heads; restore the file from "
                "the model's source"
            )
    if hf.median_filter_width % 2 == 0:
        raise ModelError(
            f"config.json: median_filter_width {hf.median_filter_width} is even, and must be odd; restore "
            "the file from the model's source"
        )
    return hf.median_filter_width


def whisper_keys(raw: Fields) -> Fields:
    """The decoder's sizes under the names of other decoders; those names stand for the encoder's in the
    file."""
    hf = decoded(raw, HfWhisper)
    return {
        "hidden_size": hf.d_model,
        "intermediate_size": hf.decoder_ffn_dim,
        "num_hidden_layers": hf.decoder_layers,
        "num_attention_heads": hf.decoder_attention_heads,
        "num_key_value_heads": hf.decoder_attention_heads,
        "head_dim": hf.d_model // hf.decoder_attention_heads,
        "max_position_embeddings": hf.max_target_positions,
        "vocab_size": hf.vocab_size,
        "rms_norm_eps": 1e-5,
    }


def whisper(raw: Fields) -> Fields:
    """Learned positions, and what the embedding is multiplied with. Raises ModelError."""
    hf = decoded(raw, HfWhisper)
    if hf.activation_function not in BLOCK_ACTIVATIONS:
        raise ModelError(
            f"config.json: activation_function {hf.activation_function} is not supported; supported are "
            f"{', '.join(BLOCK_ACTIVATIONS)}"
        )
    return {
        "activation": BLOCK_ACTIVATIONS[hf.activation_function],
        "positions": LearnedPositions(count=hf.max_target_positions, offset=0),
        "rope": NO_ROPE,
        "context_len": hf.max_target_positions,
        "embed_scale": hf.d_model**0.5 if hf.scale_embedding else 1.0,
    }


FAMILY = Family(
    model_class="runtime.models.whisper:Whisper",
    norm="layer",
    prepare=whisper_keys,
    read=whisper,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    is_gated=False,
    activation="gelu",
    is_tied=True,
)
