"""Rules on options of images, videos and sounds."""

from collections.abc import Mapping
from pathlib import Path

from runtime.devices.facts import DeviceFacts
from runtime.models.config.dual_config import DualImages
from runtime.models.config.transformers_media import TransformersEncoder
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, first_of


def limits_name_media(options: Values) -> str | None:
    """--limit-mm-data-per-request has known media only."""
    unknown = sorted(set(options["limit_mm_data_per_request"] or ()) - {"image", "video", "audio"})
    if unknown:
        return (
            f"--limit-mm-data-per-request knows image, video and audio, not {', '.join(unknown)}; leave it "
            "out"
        )
    return None


def media_limits_are_counts(options: Values) -> str | None:
    """--limit-mm-data-per-request has whole numbers only."""
    limits = options["limit_mm_data_per_request"] or {}
    wrong = [name for name, most in limits.items() if type(most) is not int or most < 0]
    if wrong:
        return f"--limit-mm-data-per-request: {', '.join(sorted(wrong))} must be a whole number, 0 or more"
    return None


PIXELS: Mapping[str, tuple[type, ...]] = {"min_pixels": (int,), "max_pixels": (int,)}
SETTINGS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "image": PIXELS,
    "video": {"fps": (int, float), "num_frames": (int,), "max_frames": (int,), **PIXELS},
}


def media_settings_are_known(options: Values) -> str | None:
    """--mm-process-config sets what is read of it, to numbers above 0."""
    settings = options["mm_process_config"] or {}
    unknown = sorted(settings.keys() - SETTINGS.keys())
    for kind in sorted(settings.keys() & SETTINGS.keys()):
        given = settings[kind]
        if not isinstance(given, dict):
            return f"--mm-process-config: {kind} must be an object of settings"
        unknown += sorted(f"{kind}.{name}" for name in given.keys() - SETTINGS[kind].keys())
    if unknown:
        taken = "; ".join(f"of {kind} it takes {', '.join(names)}" for kind, names in SETTINGS.items())
        return f"--mm-process-config: {', '.join(unknown)} is no setting; {taken}"
    for kind, given in settings.items():
        wrong = [
            name for name, value in given.items() if type(value) not in SETTINGS[kind][name] or value <= 0
        ]
        if wrong:
            return f"--mm-process-config: {kind}.{wrong[0]} must be a number above 0"
    return None


def media_folder_exists(options: Values) -> str | None:
    """--allowed-local-media-path is an absolute path of a folder."""
    path = options["allowed_local_media_path"]
    if path is None or (Path(path).is_absolute() and Path(path).is_dir()):
        return None
    return f"--allowed-local-media-path {path} requires the absolute path of a folder that exists"


def sounds_are_attended_to(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What layers that attend to sounds (Whisper's) do not go with."""
    if not isinstance(model.media, WhisperEncoder):
        return None
    speculation, parallel = plan.speculation.in_force, plan.parallel
    reasons = {
        "--enable-multimodal false": not plan.model.enable_multimodal,
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--enable-dp-attention": parallel.enable_dp_attention,
        "--attention-context-parallel-size above 1": parallel.attention_context_parallel_size > 1,
        "a draft model (--speculative-algorithm)": speculation is not None and speculation.is_own,
        "--enable-torch-compile": plan.graphs.enable_torch_compile,
        "--enable-lora": plan.lora.enable_lora,
        "--disaggregation-mode": plan.disaggregation.disaggregation_mode != "null",
    }
    if (option := first_of(reasons)) is None:
        return None
    return f"{option} is not possible: the model attends to a sound in every layer; leave it out"


def encoders_can_be_apart(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Encoders of Whisper, CLIP and SigLIP, and those that transformers computes, are not served by
    themselves: their names in checkpoints are those of the whole model."""
    if not isinstance(model.media, WhisperEncoder | DualImages | TransformersEncoder):
        return None
    options = plan.disaggregation
    for flag, is_on in (("--encoder-only", options.encoder_only), ("--language-only", options.language_only)):
        if is_on:
            return f"{flag} is not possible: the encoder of this model works with it alone; leave it out"
    return None


OPTION_RULES: tuple[OptionRule, ...] = (
    limits_name_media,
    media_limits_are_counts,
    media_settings_are_known,
    media_folder_exists,
)
PLAN_RULES: tuple[PlanRule, ...] = (sounds_are_attended_to, encoders_can_be_apart)
