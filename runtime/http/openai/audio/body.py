"""The fields of /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.errors import invalid
from runtime.http.openai.audio.form import Form
from runtime.messages.sampling import SamplingParams

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
TIMED = ("srt", "verbose_json", "vtt")  # formats that tell when something is said
MAX_PROMPT_CHARS = 1 << 16


class AudioBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a form besides its file."""

    model: str | None = None
    language: A[str, Meta(pattern="^[a-z]{2,3}$")] | None = None  # ISO 639 code; None: the model detects it
    prompt: A[str, Meta(max_length=MAX_PROMPT_CHARS)] = ""
    response_format: ResponseFormat = "json"
    temperature: A[float, Meta(ge=0, le=2)] = 0.0
    stream: bool = False
    timestamp_granularities: list[Literal["segment", "word"]] = []
    # extensions
    max_completion_tokens: A[int, Meta(ge=1, le=2**31 - 1)] | None = None
    seed: A[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_p: A[float, Meta(gt=0, le=1)] = 1.0
    top_k: A[int, Meta(ge=-1, le=2**31 - 1)] = -1
    repetition_penalty: A[float, Meta(gt=0, le=10)] = 1.0
    # without effect: sounds are always cut where they are quiet
    chunking_strategy: str | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the answer tells when something is said."""
        return self.response_format in TIMED

    @property
    def times_words(self) -> bool:
        """Whether the answer tells when each word is said."""
        return "word" in self.timestamp_granularities

    @property
    def has_segments(self) -> bool:
        """Whether a verbose answer has segments: also where nothing is said of them."""
        return not self.times_words or "segment" in self.timestamp_granularities

    def params(self, suppressed: tuple[int, ...]) -> SamplingParams:
        """Sampling parameters. `suppressed`: tokens that do not occur in the answer."""
        return SamplingParams(
            max_new_tokens=self.max_completion_tokens,
            min_new_tokens=1,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logit_bias=dict.fromkeys(suppressed, -1000.0),
            logprobs=self.response_format == "verbose_json",
        )


def read_fields(form: Form) -> AudioBody:
    """The fields of a form. Raises InvalidRequest, naming the field."""
    try:
        body = msgspec.convert(form.fields, AudioBody, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(error, AudioBody) from None
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidRequest(
            "timestamp_granularities goes with the response_format verbose_json; add that, or leave it out",
            param="timestamp_granularities",
        )
    if body.stream and body.is_timed:
        raise InvalidRequest(
            f"stream goes with the response_format json or text, not {body.response_format}; leave one out",
            param="stream",
        )
    return body
