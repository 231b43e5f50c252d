"""config.json of Qwen2.5-Omni and Qwen3-Omni: the encoders of the part that reads and writes text (the
thinker). Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation
from runtime.models.config.qwen3_vl_config import HfVision3, Qwen3VlEncoder, qwen3_encoder
from runtime.models.config.qwen_vl_config import HfVision25, QwenVlEncoder, check_output, qwen25_encoder

STRIDE = 2  # frames, or positions, that a convolution joins


class HfAudio25(Struct, frozen=True):
    """audio_config of Qwen2.5-Omni, with the defaults of transformers."""

    d_model: sizes.Width = 1280
    encoder_layers: sizes.Layers = 32
    encoder_attention_heads: sizes.Heads = 20
    encoder_ffn_dim: sizes.Width = 5120
    num_mel_bins: sizes.Width = 128
    activation_function: str = "gelu"
    n_window: sizes.Width = 100
    output_dim: sizes.Width = 3584


class HfAudio3(HfAudio25, frozen=True):
    """audio_config of Qwen3-Omni, with the defaults of transformers."""

    n_window: sizes.Width = 50
    n_window_infer: sizes.Width = 800
    downsample_hidden_size: sizes.Width = 480


class HfOmni(Struct, frozen=True):
    """What the thinker's part of config.json says of tokens, with the defaults of transformers. Published
    files of Qwen2.5-Omni have `index` in names of ids."""

    image_token_id: int | None = None
    image_token_index: int = 151655
    video_token_id: int | None = None
    video_token_index: int = 151656
    audio_token_id: int | None = None
    audio_token_index: int = 151646
    audio_start_token_id: int | None = None
    audio_end_token_id: int | None = None
    position_id_per_seconds: sizes.Width = 25
    seconds_per_chunk: sizes.Width = 2

    @property
    def image_ids(self) -> tuple[int, int]:
        """The tokens that stand for images and videos."""
        image, video = self.image_token_id, self.video_token_id
        return (
            self.image_token_index if image is None else image,
            self.video_token_index if video is None else video,
        )

    @property
    def audio_id(self) -> int:
        """The token that stands for sounds."""
        return self.audio_token_index if self.audio_token_id is None else self.audio_token_id

    @property
    def audio_marks(self) -> tuple[int, int] | None:
        """The tokens around a sound; None: the tokenizer knows them."""
        start, end = self.audio_start_token_id, self.audio_end_token_id
        return None if start is None or end is None else (start, end)


class HfOmni25(HfOmni, frozen=True):
    """The thinker of Qwen2.5-Omni."""

    vision_config: HfVision25 = HfVision25()
    audio_config: HfAudio25 = HfAudio25()


class HfOmni3(HfOmni, frozen=True):
    """The thinker of Qwen3-Omni."""

    vision_config: HfVision3 = HfVision3()
    audio_config: HfAudio3 = HfAudio3()


class HfWhole25(Struct, frozen=True):
    """A whole Qwen2.5-Omni, which speaks, too."""

    thinker_config: HfOmni25


class HfWhole3(Struct, frozen=True):
    """A whole Qwen3-Omni, which speaks, too."""

    thinker_config: HfOmni3


class OmniAudio(Struct, frozen=True, kw_only=True):
    """The encoder of sounds: Whisper's layers over parts of a spectrogram. That of Qwen2.5-Omni attends
    within a part, and averages positions in pairs. That of Qwen3-Omni (`num_channels`) has convolutions over
    frequencies as well, and attends within several parts."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int  # bins of a spectrogram's frame
    activation: str  # one of ACTIVATIONS
    text_size: int  # hidden size of the text model
    part_frames: int  # frames of a part; the last one may have fewer
    num_channels: int = 0  # of convolutions over frames and bins; 0: they are over frames
    window_parts: int = 1  # parts whose positions attend to each other
    max_frames: ClassVar[None] = None  # a spectrogram may have any number of frames

    @property
    def has_key_bias(self) -> bool:
        """Whether keys have a bias."""
        return self.num_channels > 0

    @property
    def num_folds(self) -> int:
        """Bins of a frame behind the three convolutions over them."""
        return halved(self.num_mels)

    def num_rows(self, frames: int) -> int:
        """Rows that a sound of so many frames is encoded to."""
        if not self.num_channels:
            return -(-frames // STRIDE) // STRIDE
        whole, rest = divmod(frames, self.part_frames)
        return whole * halved(self.part_frames) + halved(rest)

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner, channels = self.hidden_size, self.intermediate_size, self.num_channels
        layer = 4 * size * size + 4 * size + 2 * size * inner + inner + size + 4 * size
        ends = 2 * size + self.text_size * (size + 1)
        if not channels:
            return 3 * size * (self.num_mels + size) + 2 * size + self.num_layers * layer + ends
        planes = 9 * channels * (1 + 2 * channels) + 3 * channels + size * channels * self.num_folds
        return planes + self.num_layers * layer + ends + size * (size + 1)


def halved(length: int) -> int:
    """What three convolutions of stride 2 leave of a length."""
    for _ in range(3):
        length = -(-length // STRIDE)
    return length


class OmniEncoder(Struct, frozen=True, kw_only=True):
    """The encoders of Qwen2.5-Omni or Qwen3-Omni: of images and videos, and of sounds."""

    vision: QwenVlEncoder | Qwen3VlEncoder
    audio: OmniAudio
    audio_placeholder_id: int  # the token of a prompt that stands for a sound
    audio_marks: tuple[int, int] | None  # tokens around a sound; None: those that the tokenizer names
    # positions of a part of a video with sound: the frames of it, then its sound; 0: each frame stands before
    # what is heard from its time on
    chunk_positions: int
    has_token_grids: ClassVar[bool] = True  # tokens of images and videos have positions of frame, row, column
    kinds: ClassVar[frozenset[MediaKind]] = frozenset(MediaKind)

    @property
    def placeholder_id(self) -> int:
        """The token of a prompt that stands for an image."""
        return self.vision.placeholder_id

    @property
    def output_size(self) -> int:
        """Numbers of a row."""
        return self.vision.output_size

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        return self.vision.num_weights + self.audio.num_weights

    @property
    def num_deepstack(self) -> int:
        """Layers of the text model behind which a row has something to add."""
        return self.vision.num_deepstack if isinstance(self.vision, Qwen3VlEncoder) else 0


def read_omni25(raw: bytes, hidden_size: int) -> OmniEncoder:
    """A whole Qwen2.5-Omni. Raises ModelError."""
    return _omni25(decode(raw, HfWhole25, "config.json").thinker_config, hidden_size)


def read_thinker25(raw: bytes, hidden_size: int) -> OmniEncoder:
    """The thinker of a Qwen2.5-Omni. Raises ModelError."""
    return _omni25(decode(raw, HfOmni25, "config.json"), hidden_size)


def read_omni3(raw: bytes, hidden_size: int) -> OmniEncoder:
    """A whole Qwen3-Omni. Raises ModelError."""
    return _omni3(decode(raw, HfWhole3, "config.json").thinker_config, hidden_size)


def read_thinker3(raw: bytes, hidden_size: int) -> OmniEncoder:
    """The thinker of a Qwen3-Omni. Raises ModelError."""
    return _omni3(decode(raw, HfOmni3, "config.json"), hidden_size)


def _omni25(hf: HfOmni25, hidden_size: int) -> OmniEncoder:
    per_s = hf.position_id_per_seconds
    return OmniEncoder(
        vision=qwen25_encoder(hf.vision_config, hf.image_ids, hidden_size, per_s, has_joined_qkv=False),
        audio=_audio(hf.audio_config, hidden_size),
        audio_placeholder_id=hf.audio_id,
        audio_marks=hf.audio_marks,
        chunk_positions=per_s * hf.seconds_per_chunk,
    )


def _omni3(hf: HfOmni3, hidden_size: int) -> OmniEncoder:
    audio = hf.audio_config
    part = STRIDE * audio.n_window
    if audio.n_window_infer < part:
        raise ModelError(
            f"config.json: audio_config.n_window_infer {audio.n_window_infer} is less than twice n_window "
            f"{audio.n_window}; restore the file from the model's source"
        )
    return OmniEncoder(
        vision=qwen3_encoder(
            hf.vision_config,
            hf.image_ids,
            hidden_size,
            hf.vision_config.deepstack_visual_indexes,
            hf.position_id_per_seconds,
        ),
        audio=_audio(
            audio,
            hidden_size,
            num_channels=audio.downsample_hidden_size,
            window_parts=audio.n_window_infer // part,
        ),
        audio_placeholder_id=hf.audio_id,
        audio_marks=hf.audio_marks,
        chunk_positions=0,
    )


def _audio(hf: HfAudio25, hidden_size: int, num_channels: int = 0, window_parts: int = 1) -> OmniAudio:
    check_activation("audio_config.activation_function", hf.activation_function)
    check_output("output_dim", hf.output_dim, hidden_size, part="audio_config")
    if hf.d_model % hf.encoder_attention_heads or hf.d_model % 2:
        raise ModelError(
            f"config.json: audio_config.d_model {hf.d_model} is odd, or not a multiple of "
            f"encoder_attention_heads {hf.encoder_attention_heads}; restore the file from the model's source"
        )
    return OmniAudio(
        hidden_size=hf.d_model,
        intermediate_size=hf.encoder_ffn_dim,
        num_layers=hf.encoder_layers,
        num_heads=hf.encoder_attention_heads,
        num_mels=hf.num_mel_bins,
        activation=hf.activation_function,
        text_size=hidden_size,
        part_frames=STRIDE * hf.n_window,
        num_channels=num_channels,
        window_parts=window_parts,
    )
