"""The body of POST /generate, in SGLang's form. `null` means the same as leaving a field out."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Raw, Struct

from runtime.errors import InvalidRequest
from runtime.http.fields.bootstrap import BootstrapHost, BootstrapPort, BootstrapRoom
from runtime.http.fields.media import MediaField
from runtime.http.fields.replica import ReplicaIndex
from runtime.http.fields.request_id import Rid
from runtime.http.fields.sampling import SamplingFields
from runtime.json_value import JsonDict, JsonValue
from runtime.messages.requests import SessionParams
from runtime.messages.sampling import CacheSalt, Priority

MAX_PROMPTS = 1_024

Seconds = A[float, Meta(gt=0, lt=1e9)]
Batch = Meta(min_length=1, max_length=MAX_PROMPTS)


class SamplingBody(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`. Limits are declared in messages/sampling.py."""

    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None  # accepted without effect
    json_schema: JsonDict | str | None = None  # at most one of these four
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonDict | str | None = None
    # for the request's custom_logit_processor
    custom_params: A[JsonDict, Meta(max_length=64)] | None = None


HiddenOptions = bool | Literal["last"]  # True: of each token; "last": of the last token


class GenerateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /generate: one prompt, or a list of them. Fields that may be lists then have one entry
    for each prompt."""

    text: str | A[list[str], Batch] | None = None
    input_ids: A[list[int | list[int]], Meta(min_length=1)] | None = None
    input_embeds: A[list[Raw], Meta(min_length=1)] | None = None  # rows of numbers, or lists of rows
    sampling_params: SamplingBody | A[list[SamplingBody], Batch] | None = None
    rid: Rid | A[list[Rid], Batch] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = (
        None  # -1: output only; otherwise also the prompt, from this position on
    )
    top_logprobs_num: int | list[int] | None = None
    # tokens whose log probabilities are returned at every position
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: HiddenOptions | A[list[HiddenOptions], Batch] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: A[int, Meta(ge=0)] | None = None  # the first token whose experts are returned
    # accepted without effect
    log_metrics: bool | None = None
    no_logs: bool | None = None
    modalities: JsonValue = None  # for images
    session_id: str | None = None  # common prefixes are found in the cache
    conversation_id: str | None = None
    external_trace_header: JsonValue = None
    received_time: float | None = None
    session_params: SessionParams | None = None
    timeout: Seconds | None = None  # from arrival to the end; as the header x-request-timeout
    queue_timeout: Seconds | None = None  # from arrival to the first step; as x-queue-timeout
    custom_logit_processor: str | None = None  # the name of one of --logit-processors
    lora_path: str | A[list[str | None], Batch] | None = None  # the name of a loaded adapter
    priority: Priority | None = None
    data_parallel_rank: ReplicaIndex | None = None  # the replica that serves it; as x-data-parallel-rank
    routed_dp_rank: ReplicaIndex | None = None  # the same, SGLang's newer name
    max_thinking_tokens: int | None = None  # most tokens of reasoning; -1: no limit
    # cached prefixes are shared within one salt only; vLLM's name
    cache_salt: CacheSalt | A[list[CacheSalt], Batch] | None = None
    extra_key: CacheSalt | A[list[CacheSalt], Batch] | None = None  # a second cache_salt, SGLang's name
    # URLs (data:, http:, https:, file:) or files in base64, for the marks of the prompt, in its order
    image_data: MediaField = None
    video_data: MediaField = None
    audio_data: MediaField = None
    # the half of it that this server computes, for routers with the key: disaggregation.md
    bootstrap_host: BootstrapHost | None = None
    bootstrap_port: BootstrapPort | None = None
    bootstrap_room: BootstrapRoom | None = None
    use_audio_in_video: bool | None = None  # the model is given the sounds of videos, too
    # refused unless their value asks for nothing: LATER
    lora_id: JsonValue = None
    background: JsonValue = None
    require_reasoning: JsonValue = None
    return_bytes: JsonValue = None
    return_entropy: JsonValue = None
    return_prompt_token_ids: JsonValue = None
    return_sampling_mask: JsonValue = None
    custom_labels: JsonValue = None


_FIELDS = GenerateBody.__struct_fields__
LATER = _FIELDS[_FIELDS.index("lora_id") :]


def refuse_later(body: Struct, names: tuple[str, ...]) -> None:
    """Raises InvalidRequest for fields that are known and not supported yet."""
    for name in names:
        if getattr(body, name) not in (None, False, "", [], {}, 0):
            raise InvalidRequest(f"{name} is not served by this version yet; leave it out", param=name)
