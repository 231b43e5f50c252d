"""Bodies of /v1/chat/completions and /v1/completions. A field that is not declared here is refused, with the
nearest name in the error text.

Limits of sampling parameters are declared in runtime.messages.sampling; these types only say what is a
number, a string or a list. `null` means the same as leaving a field out, since clients send it. What each
field does is listed in parameters.py.
"""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.http.fields.bootstrap import BootstrapHost, BootstrapPort, BootstrapRoom
from runtime.http.fields.replica import ReplicaIndex
from runtime.http.fields.request_id import Rid
from runtime.http.fields.sampling import SamplingFields
from runtime.json_value import JsonDict, JsonValue
from runtime.messages.media import MediaSource
from runtime.messages.sampling import CacheSalt, Priority

MAX_MESSAGES = 16_384
MAX_PROMPTS = 1_024
MAX_TOOLS = 1_024


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream contains in addition to the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted without effect


# Unknown fields of messages are ignored: clients send earlier answers back with fields of their own.


class Function(Struct):
    """A function call of an earlier answer."""

    name: str
    arguments: str | JsonDict | None = None  # a JSON object, or its text


class CustomCall(Struct):
    """A call of a custom tool of an earlier answer."""

    name: str
    input: str


class ToolCall(Struct):
    """A tool call of an earlier answer: of a function, or of a custom tool."""

    function: Function | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | None = None


class MediaUrl(Struct):
    """The URL of an image, video or sound."""

    url: str
    detail: str | None = None  # accepted: the model's own preparation decides


class InputAudio(Struct):
    """A sound in base64."""

    data: str
    format: str | None = None  # accepted: the file itself says what it is


class Part(Struct):
    """A part of a message's content: a text, a refusal of another model, an image, a video or a sound."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None
    input_audio: InputAudio | None = None


class SourcePart(Part, kw_only=True):
    """An image, video or sound of another API's request. Clients of this one cannot write it."""

    source: MediaSource


class Prediction(Struct, forbid_unknown_fields=True):
    """What the client expects the answer to be like, in text or parts of type text."""

    content: str | list[Part]
    type: Literal["content"] = "content"


class Message(Struct):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # reasoning of an earlier answer, for templates that render it
    reasoning: str | None = None  # vLLM's name of reasoning_content


class ProcessorArgs(Struct, forbid_unknown_fields=True):
    """`mm_processor_kwargs`: how a request's files are prepared."""

    use_audio_in_video: bool | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """`reasoning`: the form in which some clients send reasoning_effort."""

    effort: str | float | None = None
    enabled: bool | None = None
    max_tokens: int | None = None  # as thinking_token_budget


class NotServed(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields, and those that are refused unless their value asks for nothing (parameters.py)."""

    lora_path: str | list[str | None] | None = None
    routed_experts_prompt_start: JsonValue = None
    return_cached_tokens_details: JsonValue = None
    custom_params: JsonValue = None
    custom_logit_processor: JsonValue = None
    session_params: JsonValue = None
    images_config: JsonValue = None
    disagg_prefill_dp_rank: JsonValue = None
    ngram_corpus_id: JsonValue = None
    custom_labels: JsonValue = None
    use_beam_search: JsonValue = None
    length_penalty: JsonValue = None
    watermarking: JsonValue = None
    truncate_prompt_tokens: JsonValue = None
    truncation_side: JsonValue = None
    kv_transfer_params: JsonValue = None
    ec_transfer_params: JsonValue = None
    vllm_xargs: JsonValue = None
    repetition_detection: JsonValue = None
    return_token_offsets: JsonValue = None
    return_mm_kwargs: JsonValue = None
    guided_whitespace_pattern: JsonValue = None
    logits_processors: JsonValue = None
    early_stopping: JsonValue = None


class Shared(NotServed, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling, in addition to SamplingFields
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    thinking_token_budget: int | None = None  # most tokens of reasoning; -1: no limit (vLLM)
    include_stop_str_in_output: bool | None = None  # vLLM
    no_stop_trim: bool | None = None  # SGLang's name of include_stop_str_in_output
    # what the answer contains in addition to the text
    return_token_ids: bool | None = None
    return_hidden_states: bool | Literal["last"] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: A[int, Meta(ge=0)] | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    stream_interval: A[int, Meta(ge=1)] | None = None
    # the request itself
    rid: Rid | list[Rid] | None = None  # request id, SGLang's name
    request_id: Rid | None = None  # request id, vLLM's name
    priority: Priority | None = None  # see --enable-priority-scheduling
    data_parallel_rank: ReplicaIndex | None = None  # the replica that serves it; as x-data-parallel-rank
    routed_dp_rank: ReplicaIndex | None = None  # the same, SGLang's newer name
    bootstrap_host: BootstrapHost | None = None  # as in disaggregation.md; so are the next two
    bootstrap_port: BootstrapPort | None = None
    bootstrap_room: BootstrapRoom | None = None
    # cached prefixes are shared within one salt only; vLLM's name
    cache_salt: CacheSalt | list[CacheSalt] | None = None
    extra_key: CacheSalt | list[CacheSalt] | None = None  # a second cache_salt, SGLang's name
    # accepted without effect
    user: str | None = None
    metadata: JsonDict | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None
    session_id: str | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: str | None = None
    # constraint of the output: at most one of these (http/fields/constraint.py)
    response_format: JsonDict | None = None
    json_schema: JsonDict | str | None = None  # SGLang; also regex, ebnf and structural_tag
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonDict | str | None = None
    structured_outputs: JsonDict | None = None  # vLLM; older names are guided_*
    guided_json: JsonDict | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: A[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: A[list[JsonDict], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | JsonDict | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonDict | None = None
    reasoning_effort: str | float | None = None  # passed to the chat template
    enable_thinking: bool | None = None  # passed to the chat template
    reasoning: Reasoning | None = None
    prediction: Prediction | None = None
    documents: list[JsonDict] | None = None
    input_ids: A[list[int], Meta(min_length=1)] | None = None  # the prompt; messages are then not rendered
    return_prompt_token_ids: bool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None  # False: reasoning is part of the content
    stream_reasoning: bool | None = None  # False: reasoning is sent in one piece
    include_reasoning: bool | None = None  # False: reasoning is left out
    use_audio_in_video: bool | None = None  # the model is given the sounds of videos, too
    mm_processor_kwargs: ProcessorArgs | None = None
    # accepted without effect
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    # refused
    functions: JsonValue = None
    function_call: JsonValue = None
    moderation: JsonValue = None
    audio: JsonValue = None
    web_search_options: JsonValue = None
    return_meta_info: JsonValue = None
    return_prompt_text: JsonValue = None
    task: JsonValue = None
    max_dynamic_patch: JsonValue = None
    min_dynamic_patch: JsonValue = None
    media_io_kwargs: JsonValue = None
    echo: JsonValue = None
    add_special_tokens: JsonValue = None
    chat_template: JsonValue = None
    best_of: JsonValue = None


class CompletionBody(Shared, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions. The prompt is a text, a list of texts, token ids, or lists of token
    ids."""

    prompt: str | A[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None  # text after the completion (see --completion-template)
    add_special_tokens: bool | None = None  # False: the tokenizer adds no BOS token
    prompt_embeds: JsonValue = None  # refused
