"""Answers of the native API, in SGLang's form. They are encoded as these types, and the OpenAPI document is
made of them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import CachedTokensDetails
from runtime.json_value import JsonValue

# log probability, token id, and the token's text where it was requested
Triple = tuple[float | None, int, str | None]


class FinishReason(Struct, kw_only=True, forbid_unknown_fields=True):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """`meta_info` of an answer, so far."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int | UnsetType = UNSET
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | None | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET  # of the prompt; these at the end, where it has media
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    cached_media: int | UnsetType = UNSET  # images, videos and sounds that were not encoded
    encode_seconds: float | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    e2e_latency: float
    spec_verify_ct: int | UnsetType = UNSET  # steps that verified drafts; these, where there were some
    spec_draft_token_num: int | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET  # accepted drafts of all drafts
    spec_accept_length: float | UnsetType = UNSET  # tokens that such a step brought on average
    spec_accept_histogram: list[int] | UnsetType = UNSET  # steps with 0, 1, 2, ... accepted drafts
    hidden_states: JsonValue | UnsetType = UNSET  # in SGLang's form: fields/hidden_states.py
    routed_experts: str | UnsetType = UNSET  # as fields/routed_experts.py writes them
    routed_experts_start_len: int | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Triple] | None] | UnsetType = UNSET


class Generated(Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer of /generate, or an event of its stream."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET  # in events, where there are several answers


class Encoded(Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer of /encode."""

    embedding: list[float]
    meta_info: MetaInfo
