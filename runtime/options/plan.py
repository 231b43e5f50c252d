"""The values in force, each with where it came from and why; resolve.py makes them."""

from typing import Any

from msgspec import Struct

from runtime.messages.memory import OffloadSpec
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.kv_events import KVEvents
from runtime.options.table import rows


class Provenance(Struct, frozen=True):
    """Where a value came from: `default`, `flag --x`, `file server.yaml`, `argument` or `derived`, and why it
    is what it is."""

    value: Any
    source: str
    reason: str = ""


class Plan(Struct, frozen=True, kw_only=True):
    """The values in force. Sizes are tokens unless the name says otherwise."""

    model_path: str
    tokenizer_path: str
    load_format: str
    model_checksum: str | None
    json_model_override_args: dict[str, Any]
    is_embedding: bool
    pooling: str  # last, mean, cls; none: the model generates
    weight_version: str
    enable_memory_saver: bool  # memory can be given back
    enable_weights_cpu_backup: bool
    enable_cache_report: bool
    enable_return_hidden_states: bool
    context_length: int
    served_model_name: str
    chat_template: str  # one of text/chat_templates.py, or a file; "auto": the tokenizer's own
    hf_chat_template_name: str | None
    reasoning_parser: str  # one of parsing/formats.py; "none"; "auto": by the chat template. So is the next
    tool_call_parser: str
    file_storage_path: str | None  # None: no files, no batches
    file_storage_bytes: int
    enable_custom_logit_processor: bool
    logit_processors: list[str]
    warmups: str | None
    sampling_defaults: str  # model or openai
    preferred_sampling_params: dict[str, Any] | None
    multi_item_scoring_delimiter: int | None
    completion_template: str  # one of text/infill.py, or a file; "auto": by the vocabulary
    host: str
    port: int
    max_body_bytes: int
    shutdown_timeout: float  # seconds
    fastapi_root_path: str
    grpc_mode: bool
    cors_origins: tuple[str, ...] | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_keyfile_password: str | None
    ssl_ca_certs: str | None
    api_key: tuple[str, ...] | str | None
    admin_api_key: str | None
    device: str
    tensor_parallel_size: int
    expert_parallel_size: int  # divides tensor_parallel_size
    moe_a2a_backend: str
    deepep_mode: str
    expert_distribution_recorder_mode: str | None
    expert_distribution_recorder_buffer_size: int  # steps
    enable_expert_distribution_metrics: bool
    num_ranks: int
    base_gpu_id: int
    gpu_id_step: int
    num_threads: int  # of each rank
    numa_node: tuple[int, ...] | None  # of each rank, or one of all; None: ranks run anywhere
    dtype: str  # float32, bfloat16, float16; auto: the weights' own, where config.json names none
    mem_fraction_static: float
    max_total_tokens: int | None  # None: as many as mem_fraction_static allows
    page_size: int
    cpu_offload_gb: int  # of each rank; 0: none
    offload_group_size: int  # layers; -1: no groups
    offload_num_in_group: int
    offload_prefetch_step: int
    offload_mode: str  # cpu
    swa_full_tokens_ratio: float
    disable_hybrid_swa_memory: bool
    max_mamba_cache_size: int | None  # states; None: as the ratio says
    mamba_full_memory_ratio: float  # bytes of states for each of keys and values
    mamba_scheduler_strategy: str  # no_buffer or extra_buffer
    mamba_track_interval: int  # tokens
    disable_radix_cache: bool
    radix_eviction_policy: str
    isolate_tenants: bool
    hicache_storage_backend: str | None
    hicache_storage_prefetch_policy: str
    hicache_storage_backend_extra_config: dict[str, Any] | None
    enable_hierarchical_cache: bool
    hicache_ratio: float  # host pages for each device page
    hicache_size: int  # gigabytes of each rank; 0: as hicache_ratio says
    hicache_write_policy: str
    hicache_io_backend: str
    hicache_mem_layout: str  # a row of LAYOUTS in ranks/host_memory.py
    enable_fp32_lm_head: bool
    quantization: str | None  # None: as the checkpoint is
    kv_cache_dtype: str  # bfloat16, fp8_e4m3, fp8_e5m2; or that of the activations
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int  # -1: no chunks
    max_prefill_tokens: int
    max_step_tokens: int
    prefill_max_requests: int | None
    enable_dynamic_chunking: bool
    long_prompt_share: float
    schedule_policy: str
    max_overtakes: int
    fair_share: str
    fair_share_weights: dict[str, float]
    enable_priority_scheduling: bool
    abort_on_priority_when_disabled: bool
    schedule_low_priority_values_first: bool
    priority_scheduling_preemption_threshold: int
    schedule_conservativeness: float
    num_continuous_decode_steps: int
    enable_prefill_delayer: bool
    prefill_delayer_max_delay_passes: int
    prefill_delayer_token_usage_low_watermark: float | None
    prefill_delayer_forward_passes_buckets: tuple[float, ...] | None
    prefill_delayer_wait_seconds_buckets: tuple[float, ...] | None
    queue_timeout: float | None
    request_timeout: float | None
    stream_interval: int
    stream_output: bool
    allow_auto_truncate: bool
    disable_overlap_schedule: bool
    watchdog_timeout: float  # seconds; 0: off
    soft_watchdog_timeout: float | None
    attention_backend: str
    prefill_attention_backend: str
    decode_attention_backend: str
    sampling_backend: str
    fp8_gemm_backend: str  # by_rows, triton, cutlass
    moe_runner_backend: str
    grammar_backend: str
    grammar_timeout: float  # seconds
    disable_jump_forward: bool
    constrained_json_whitespace_pattern: str | None
    constrained_json_disable_any_whitespace: bool
    enable_lora: bool
    max_lora_rank: int | None
    lora_target_modules: tuple[str, ...] | None
    lora_paths: tuple[str, ...] | None
    max_loras_per_batch: int
    max_loaded_loras: int | None
    lora_eviction_policy: str
    lora_backend: str
    disable_cuda_graph: bool
    cuda_graph_max_bs: int  # 0: no graphs
    cuda_graph_bs: tuple[int, ...]  # numbers of sequences of captured decode steps
    disable_cuda_graph_padding: bool
    enable_profile_cuda_graph: bool
    enable_piecewise_cuda_graph: bool
    piecewise_cuda_graph_max_tokens: int  # 0: none
    piecewise_cuda_graph_tokens: tuple[int, ...]  # numbers of tokens of steps that are captured in pieces
    piecewise_cuda_graph_compiler: str
    enable_torch_compile: bool
    enable_torch_compile_debug_mode: bool
    torch_compile_max_bs: int
    enable_cudagraph_gc: bool
    enable_torch_symm_mem: bool
    kv_events_config: KVEvents | None
    random_seed: int
    log_level: str
    log_format: str
    log_level_http: str | None  # None: no access log
    uvicorn_access_log_exclude_prefixes: tuple[str, ...]
    log_requests: bool
    log_requests_level: int
    log_requests_format: str
    log_requests_target: tuple[str, ...] | None  # None: standard error
    crash_dump_folder: str | None
    gc_warning_threshold_secs: float  # 0: no warnings
    decode_log_interval: int | None  # steps
    enable_request_time_stats_logging: bool
    extra_metric_labels: dict[str, str] | None
    bucket_time_to_first_token: tuple[float, ...] | None  # this and the next two: None: the usual ones
    bucket_inter_token_latency: tuple[float, ...] | None
    bucket_e2e_request_latency: tuple[float, ...] | None
    collect_tokens_histogram: bool
    prompt_tokens_buckets: tuple[str, ...] | None  # default, tse MIDDLE BASE COUNT, custom BOUND ...
    generation_tokens_buckets: tuple[str, ...] | None
    export_metrics_to_file: bool
    export_metrics_to_file_dir: str | None
    # this and the next four: what ranks on npu devices find in their environment; None: nothing of ours
    npu_alloc_conf: str | None
    npu_streams: str | int | None
    npu_task_queue: str | int | None
    hccl_buffer_mb: str | int | None
    hccl_expansion_mode: str | None
    npu_mla_prolog: bool
    npu_nz_cache: bool
    npu_multi_stream: bool
    npu_gather_after_q: bool
    profile: str | None
    null_step_s: float
    null_token_s: float
    null_vocab_size: int
    null_first_token: int
    null_poison_token: int | None
    null_poison: str
    why: dict[str, Provenance]
    notices: list[str]  # what to tell the user at start: options that were accepted without effect

    def public(self) -> dict[str, dict[str, Any]]:
        """Every value with its source and reason, as JSON can say it; secrets are hidden."""
        secrets = {row.name for row in rows() if row.secret}
        return {
            name: {
                "value": "(hidden)" if name in secrets and origin.value else origin.value,
                "source": origin.source,
                "reason": origin.reason,
            }
            for name, origin in self.why.items()
        }

    @property
    def exchanges_tokens(self) -> bool:
        """Ranks have parts of a step's tokens between attentions, and whole shared experts."""
        return self.moe_a2a_backend != "none"

    @property
    def expert_steps(self) -> int | None:
        """Steps that a record of expert load holds; None: nobody counts."""
        if self.expert_distribution_recorder_mode is not None:
            return self.expert_distribution_recorder_buffer_size
        return 0 if self.enable_expert_distribution_metrics else None

    @property
    def offload(self) -> OffloadSpec | None:
        """None: all weights are on the device."""
        if not self.cpu_offload_gb and self.offload_group_size <= 0:
            return None
        return OffloadSpec(
            self.cpu_offload_gb * 2**30,
            self.offload_group_size,
            self.offload_num_in_group,
            self.offload_prefetch_step,
        )

    @property
    def window_ratio(self) -> float:
        """Tokens of sliding-window layers for each of the full ones; 0: they share the same pages."""
        return 0.0 if self.disable_hybrid_swa_memory else self.swa_full_tokens_ratio

    @property
    def state_interval(self) -> int:
        """Tokens between two states that are kept while a sequence decodes; 0: none are."""
        return self.mamba_track_interval if self.mamba_scheduler_strategy == "extra_buffer" else 0

    @property
    def rank_environment(self) -> dict[str, str]:
        """Variables that the ranks' libraries read."""
        said = {variable: getattr(self, option) for option, (variable, _, _) in RANK_VARIABLES.items()}
        return {variable: str(value) for variable, value in said.items() if value is not None}

    @property
    def device_options(self) -> dict[str, Any]:
        """What only the chosen device reads (StartRank.device_options)."""
        if self.device in ("cuda", "npu"):
            own = (
                {
                    "mla_prolog": self.npu_mla_prolog,
                    "needs_prolog": not self.why["npu_mla_prolog"].source.startswith("profile"),
                    "nz_cache": self.npu_nz_cache,
                    "multi_stream": self.npu_multi_stream,
                    "gather_after_q": self.npu_gather_after_q,
                    "sampling": self.sampling_backend,
                }
                if self.device == "npu"
                else {
                    "collects": self.enable_cudagraph_gc,
                    "shares": self.enable_torch_symm_mem,
                    "fp8_gemm": self.fp8_gemm_backend,
                    "prefill": self.prefill_attention_backend,
                    "decode": self.decode_attention_backend,
                }
            )
            return {"first": self.base_gpu_id, "step": self.gpu_id_step, **own}
        if self.device != "null":
            return {}
        return {
            "step_s": self.null_step_s,
            "token_s": self.null_token_s,
            "vocab_size": self.null_vocab_size,
            "first_token": self.null_first_token,
            "poison_token": self.null_poison_token,
            "poison": self.null_poison,
        }
