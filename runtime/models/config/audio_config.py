"""config.json of models that take sounds: their encoders. Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation

STRIDE = 2  # frames of a spectrogram that become one position of the tower
POOLED = 2  # positions of the tower that become one row of the encoding


class HfWhisperTower(Struct, frozen=True):
    """audio_config of Qwen2-Audio, with the defaults of transformers."""

    d_model: sizes.Width = 1280
    encoder_layers: sizes.Layers = 32
    encoder_attention_heads: sizes.Heads = 20
    encoder_ffn_dim: sizes.Width = 5120
    num_mel_bins: sizes.Width = 128
    max_source_positions: sizes.Width = 1500
    activation_function: str = "gelu"


class HfQwen2Audio(Struct, frozen=True):
    """What Qwen2-Audio's config.json says of sounds, with the defaults of transformers."""

    audio_config: HfWhisperTower = HfWhisperTower()
    audio_token_index: int | None = None
    audio_token_id: int | None = None


class QwenAudioEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of Qwen2-Audio: Whisper's tower over mel spectrograms, whose positions are averaged in
    pairs and projected to the size of the text model."""

    placeholder_id: int  # the token of a prompt that stands for a sound
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int  # bins of a spectrogram's frame
    num_positions: int  # of the tower, of a sound of the greatest length
    activation: str  # one of ACTIVATIONS
    output_size: int  # hidden size of the text model
    has_key_bias: ClassVar[bool] = False  # keys of the tower have a bias
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.AUDIO})

    @property
    def max_frames(self) -> int:
        """Frames of a sound of the greatest length."""
        return STRIDE * self.num_positions

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * size * size + 3 * size + 2 * size * inner + inner + size + 4 * size
        convolutions = 3 * size * (self.num_mels + size) + 2 * size
        table = self.num_positions * size + 2 * size
        return convolutions + table + self.num_layers * layer + self.output_size * (size + 1)


def num_positions(frames: int) -> int:
    """Positions of the tower for a sound of so many frames."""
    return -(-frames // STRIDE)


def num_rows(frames: int) -> int:
    """Rows that a sound of so many frames is encoded to."""
    return num_positions(frames) // POOLED


def read_qwen2_audio(raw: bytes, hidden_size: int) -> QwenAudioEncoder:
    """Qwen2-Audio. Raises ModelError."""
    hf = decode(raw, HfQwen2Audio, "config.json")
    tower = hf.audio_config
    check_activation("audio_config.activation_function", tower.activation_function)
    if tower.d_model % tower.encoder_attention_heads:
        raise ModelError(
            f"config.json: audio_config.d_model {tower.d_model} is not a multiple of encoder_attention_heads "
            f"{tower.encoder_attention_heads}; restore the file from the model's source"
        )
    placeholder_id = hf.audio_token_index if hf.audio_token_id is None else hf.audio_token_id
    return QwenAudioEncoder(
        placeholder_id=151646 if placeholder_id is None else placeholder_id,
        hidden_size=tower.d_model,
        intermediate_size=tower.encoder_ffn_dim,
        num_layers=tower.encoder_layers,
        num_heads=tower.encoder_attention_heads,
        num_mels=tower.num_mel_bins,
        num_positions=tower.max_source_positions,
        activation=tower.activation_function,
        output_size=hidden_size,
    )
