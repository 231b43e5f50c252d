"""From options to what may be fetched and decoded."""

from pathlib import Path

from runtime.media.settings import DecodeLimits, MediaSettings
from runtime.media_settings import media_settings
from runtime.messages.media import MediaKind
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.text.media_prompts import SoundLimits


def settings(sounds: SoundLimits | None = None, **options: object) -> MediaSettings:
    plan = plan_for(from_values({"model_path": "pocket", "device": "cpu", **options}))
    return media_settings(plan, sounds)


def test_nothing_is_private_without_options() -> None:
    assert settings() == MediaSettings()


def test_options_say_what_is_allowed(tmp_path: Path) -> None:
    assert settings(
        mm_per_request_timeout=3.5,
        mm_max_concurrent_calls=4,
        limit_mm_data_per_request={"image": 2, "audio": 0},
        allowed_media_domains=("Files.Corp.", "10.0.0.1"),
        allowed_local_media_path=str(tmp_path),
        mm_process_config={"video": {"fps": 1, "max_frames": 16}},
    ) == MediaSettings(
        timeout_s=3.5,
        max_fetches=4,
        max_files={MediaKind.IMAGE: 2, MediaKind.AUDIO: 0},
        domains=frozenset({"files.corp", "10.0.0.1"}),
        folder=str(tmp_path),
        decode=DecodeLimits(fps=1.0, max_frames=16),
    )


def test_sounds_are_decoded_as_the_model_takes_them() -> None:
    found = settings(SoundLimits(rate=16000, max_s=30.0), mm_process_config={"video": {"fps": 1}})
    assert found.decode == DecodeLimits(fps=1.0, sound_rate=16000, max_audio_s=30.0)
