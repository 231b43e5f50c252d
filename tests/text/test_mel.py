"""Spectrograms against transformers' own feature extractor, and what a model's files say of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from runtime.errors import ModelError
from runtime.models.config.audio_config import QwenAudioEncoder, num_rows, read_qwen2_audio
from runtime.models.config.mel_config import MelConfig, read_mel_config
from runtime.text.mel import log_mels
from tests.models.make_audio import SOUND_PREPARATION, TOWER


@pytest.mark.parametrize("count", [1, 159, 161, 5000, 15_999, 16_000])
@pytest.mark.parametrize(
    "fields",
    [
        {"feature_size": 128},
        {"chunk_length": 1},
        {"feature_size": 20, "chunk_length": 1, "hop_length": 40, "n_fft": 100},
    ],
    ids=str,
)
def test_spectrograms_are_near_to_those_of_transformers(fields: dict[str, int], count: int) -> None:
    config, rng = MelConfig(**fields), np.random.default_rng(count)
    samples = (rng.standard_normal(count) * rng.choice((0.1, 1e-4))).astype(np.float32)
    expected = WhisperFeatureExtractor(**fields)(
        samples, sampling_rate=16000, return_tensors="np", return_attention_mask=True
    )
    frames = -(-count // config.hop_length)
    assert expected["attention_mask"].sum() == frames
    for more in (0, 2):
        wanted = min(frames + more, config.max_frames)
        found = log_mels(samples, config, wanted)
        assert found.shape == (config.feature_size, wanted) and found.dtype == np.float32
        np.testing.assert_allclose(found, expected["input_features"][0, :, :wanted], atol=5e-5)


def test_silence_has_a_spectrogram() -> None:
    assert (log_mels(np.zeros(800, np.float32), MelConfig(), 5) == -1.5).all()


def encoder(**fields: Any) -> QwenAudioEncoder:
    return read_qwen2_audio(json.dumps({"audio_config": TOWER | fields}).encode(), 64)


def test_rows_are_those_of_the_published_model() -> None:
    published = read_qwen2_audio(b'{"audio_config": {"d_model": 1280}}', 4096)
    assert (published.placeholder_id, published.max_frames, num_rows(3000)) == (151646, 3000, 750)
    assert [num_rows(frames) for frames in range(8)] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert published.num_weights == 636_968_960 + 5_246_976, "tower and projector of transformers"


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_files_say_how_sounds_are_prepared(name: str, tmp_path: Path) -> None:
    extractor = WhisperFeatureExtractor(**SOUND_PREPARATION).to_dict() | {"padding_side": "right"}
    fields = extractor if name == "preprocessor_config.json" else {"feature_extractor": extractor}
    (tmp_path / name).write_text(json.dumps(fields, default=np.ndarray.tolist))
    assert read_mel_config(tmp_path, encoder()) == MelConfig(feature_size=20, chunk_length=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_size": 80}, "a feature_size of 80, and config.json one of 20"),
        ({"chunk_length": 30}, "a number of frames of 3000, and config.json one of 100"),
        ({"dither": 0.1}, "dither and padding_value are supported as 0 alone"),
        ({"hop_length": 0}, "hop_length"),
        ({"n_fft": 16000}, "a chunk_length of 1 s is shorter than n_fft"),
    ],
    ids=str,
)
def test_files_that_do_not_fit_the_encoder_are_refused(
    fields: dict[str, float], message: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SOUND_PREPARATION | fields))
    with pytest.raises(ModelError, match=message):
        read_mel_config(tmp_path, encoder())


def test_towers_whose_heads_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="d_model 32 is not a multiple of encoder_attention_heads 3"):
        encoder(encoder_attention_heads=3)
