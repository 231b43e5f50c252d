"""What SGLang's routes answer here, and the controls. Answers are encoded as these, and the OpenAPI document
is made of them."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import Tiers

# log probability, token id, and its text where that was asked for
Triple = tuple[float | None, int, str | None]


class FinishReason(Struct, kw_only=True, forbid_unknown_fields=True):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """About an answer, so far."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int | UnsetType = UNSET
    cached_tokens: int
    cached_tokens_details: Tiers | None | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    e2e_latency: float
    hidden_states: Any = UNSET  # in SGLang's form: hidden.py
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
    index: int | UnsetType = UNSET  # of an event, where there are several answers


class Encoded(Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer of /encode."""

    embedding: list[float]
    meta_info: MetaInfo


class Tokenized(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer of /tokenize: of a text, or of several."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | None | UnsetType = UNSET


class Detokenized(Struct, forbid_unknown_fields=True):
    """The answer of /detokenize, in the words of SGLang and of vLLM."""

    text: str | list[str]
    prompt: str | list[str]


class ModelInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer of /get_model_info."""

    model_path: str | None
    tokenizer_path: str | None
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    architectures: list[str | None]
    context_length: int
    vocab_size: int


class ParsedCall(Struct, forbid_unknown_fields=True):
    """A call that was found."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(Struct, forbid_unknown_fields=True):
    """The answer of /parse_function_call."""

    normal_text: str
    calls: list[ParsedCall]


class ParsedReasoning(Struct, forbid_unknown_fields=True):
    """The answer of /separate_reasoning."""

    reasoning_text: str
    text: str


class Memory(Struct, forbid_unknown_fields=True):
    """On the devices."""

    weight_gb: float
    kv_cache_gb: float
    token_capacity: int


class SchedulerLoad(Struct, kw_only=True, forbid_unknown_fields=True):
    """How busy one scheduler is."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    num_cached_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    num_steps: int
    page_size: int
    memory: Memory
    queues: dict[str, int]


class AllLoads(Struct, forbid_unknown_fields=True):
    """How busy all are together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float


class Loads(Struct, forbid_unknown_fields=True):
    """The answer of /v1/loads."""

    timestamp: float
    dp_rank_count: int
    loads: list[SchedulerLoad]
    aggregate: AllLoads


class OldLoad(Struct, forbid_unknown_fields=True):
    """Of /get_load."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    ts_tic: float


class Done(Struct, forbid_unknown_fields=True):
    """An order was carried out."""

    status: Literal["ok"]
    message: str


class Aborted(Struct, forbid_unknown_fields=True):
    """How many requests were ended."""

    aborted: int


class Adapters(Struct, forbid_unknown_fields=True):
    """Adapters came or went: those loaded now, name and folder."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class Profiled(Struct, forbid_unknown_fields=True):
    """Where the records are."""

    message: str
    output_dir: str


class ExpertRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What became of the record of expert load."""

    message: str
    num_steps: int | None = None  # that it held
    file: str | None = None  # it was written to
    layers: list[int] | None = None  # those with experts
    # of each of them, tokens of each expert since the ranks started
    total_count: list[list[int]] | None = None


class Probed(Struct, forbid_unknown_fields=True):
    """The answer of /health_generate."""

    state: Literal["ready"]
    output_ids: list[int]


class Version(Struct, forbid_unknown_fields=True):
    """The version of this server."""

    version: str
