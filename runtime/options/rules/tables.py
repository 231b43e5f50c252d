"""Relations between options, as tables: what an option needs, requires, excludes, goes with or divides.

Relations of refused options are here too: they are shown next to the refusal.
"""

from collections.abc import Iterator
from functools import cache

from runtime.options.declare import Value
from runtime.options.rules.base import Values, flag, is_set
from runtime.options.table import rows

# options that do nothing without another one: a name, or a prefix that ends in _, and what must be set (one
# of several)
NEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("speculative_", ("speculative_algorithm",)),
    ("max_lora_rank", ("enable_lora", "lora_paths")),
    ("lora_target_modules", ("enable_lora", "lora_paths")),
    ("max_loaded_loras", ("enable_lora", "lora_paths")),
    ("enable_lora_overlap_loading", ("enable_lora", "lora_paths")),
    ("hicache_", ("enable_hierarchical_cache", "disaggregation_mode", "enable_lmcache")),
    ("disaggregation_", ("disaggregation_mode", "encoder_only", "language_only")),
    ("encoder_urls", ("language_only",)),
    ("hicache_storage_prefetch_policy", ("hicache_storage_backend", "enable_lmcache")),
    ("hicache_storage_backend_extra_config", ("hicache_storage_backend", "enable_lmcache")),
    ("prefill_delayer_", ("enable_prefill_delayer",)),
    ("priority_scheduling_", ("enable_priority_scheduling",)),
    ("logit_processors", ("enable_custom_logit_processor",)),
    ("isolate_tenants", ("fair_share", "api_key", "api_key_file")),
    ("ssl_", ("ssl_certfile",)),
    ("schedule_low_priority_values_first", ("enable_priority_scheduling",)),
    ("eplb_", ("enable_eplb",)),
    ("export_metrics_to_file_dir", ("export_metrics_to_file",)),
    ("otlp_traces_endpoint", ("enable_trace",)),
    ("enable_dp_lm_head", ("enable_dp_attention",)),
    ("enable_nsa_prefill_context_parallel", ("attention_context_parallel_size",)),
    ("nsa_prefill_cp_mode", ("enable_nsa_prefill_context_parallel",)),
    ("log_requests_level", ("log_requests", "crash_dump_folder")),
    ("uvicorn_access_log_exclude_prefixes", ("log_level_http",)),
    ("log_requests_format", ("log_requests",)),
    ("log_requests_target", ("log_requests",)),
    ("expert_distribution_recorder_buffer_size", ("expert_distribution_recorder_mode",)),
    ("torch_compile_max_bs", ("enable_torch_compile",)),
    ("enable_torch_compile_debug_mode", ("enable_torch_compile", "piecewise_cuda_graph_compiler")),
    ("prompt_tokens_buckets", ("collect_tokens_histogram",)),
    ("generation_tokens_buckets", ("collect_tokens_histogram",)),
    ("enable_prefix_mm_cache", ("encoder_only",)),
    ("dllm_algorithm_config", ("dllm_algorithm",)),
    ("tokenizer_metrics_custom_labels_header", ("tokenizer_metrics_allowed_custom_labels",)),
    ("tbo_token_distribution_threshold", ("enable_two_batch_overlap",)),
    ("enable_single_batch_overlap", ("moe_a2a_backend",)),
    ("deepep_mode", ("moe_a2a_backend",)),
    ("enable_weights_cpu_backup", ("enable_memory_saver",)),
    ("enable_draft_weights_cpu_backup", ("enable_memory_saver",)),
    ("enable_draft_weights_cpu_backup", ("speculative_algorithm",)),
    ("offload_num_in_group", ("offload_group_size",)),
    ("modelopt_quant", ("quantize_and_serve",)),
    ("pp_", ("pipeline_parallel_size",)),
    ("pdmux_config_path", ("enable_pdmux",)),
    ("sm_group_num", ("enable_pdmux",)),
    ("decrypted_draft_config_file", ("speculative_draft_model_path",)),
    ("debug_tensor_dump_", ("debug_tensor_dump_output_folder",)),
    ("debug_tensor_dump_input_file", ("debug_tensor_dump_inject",)),
    ("offload_prefetch_step", ("cpu_offload_gb", "offload_group_size")),
)

# options that must be given when another one is
REQUIRES: tuple[tuple[str, str], ...] = (
    ("export_metrics_to_file", "export_metrics_to_file_dir"),
    ("language_only", "encoder_urls"),
    ("debug_tensor_dump_inject", "debug_tensor_dump_input_file"),
    ("tokenizer_metrics_allowed_custom_labels", "tokenizer_metrics_custom_labels_header"),
)

# pairs that exclude one another
EXCLUDES: tuple[tuple[str, str], ...] = (
    ("enable_hierarchical_cache", "disable_radix_cache"),
    ("disaggregation_mode", "disable_radix_cache"),
    ("enable_lmcache", "disable_radix_cache"),
    ("enable_lmcache", "disaggregation_mode"),
    ("enable_lmcache", "encoder_only"),
    ("kv_events_config", "disable_radix_cache"),
    ("encoder_only", "language_only"),
    ("encoder_only", "disaggregation_mode"),
    ("encoder_only", "speculative_algorithm"),
    ("encoder_only", "enable_lora"),
    ("encoder_only", "enable_hierarchical_cache"),
    ("encoder_only", "enable_memory_saver"),
    ("dllm_algorithm", "enable_lora"),
    ("cpu_offload_gb", "offload_group_size"),
    ("enable_eplb", "cpu_offload_gb"),
    ("enable_eplb", "offload_group_size"),
    ("enable_eplb", "enable_weights_cpu_backup"),
    ("enable_eplb", "delete_ckpt_after_loading"),
    ("torchao_config", "quantization"),
    ("torchao_config", "quantize_and_serve"),
    ("enable_weights_cpu_backup", "cpu_offload_gb"),
    ("enable_weights_cpu_backup", "offload_group_size"),
    ("dllm_algorithm", "disaggregation_mode"),
    ("dllm_algorithm", "speculative_algorithm"),
    ("dllm_algorithm", "enable_dp_attention"),
    ("dllm_algorithm", "enable_two_batch_overlap"),
    ("dllm_algorithm", "enable_pdmux"),
    ("dllm_algorithm", "pipeline_parallel_size"),
    ("dllm_algorithm", "attention_context_parallel_size"),
    ("enable_pdmux", "enable_lora"),
    ("enable_pdmux", "debug_tensor_dump_output_folder"),
    ("enable_pdmux", "forward_hooks"),
    ("enable_pdmux", "cpu_offload_gb"),
    ("enable_pdmux", "offload_group_size"),
    ("enable_two_batch_overlap", "enable_torch_symm_mem"),
    ("enable_two_batch_overlap", "enable_symm_mem"),
    ("enable_symm_mem", "enable_torch_symm_mem"),
    ("enable_two_batch_overlap", "enable_piecewise_cuda_graph"),
    ("enable_two_batch_overlap", "cpu_offload_gb"),
    ("enable_two_batch_overlap", "debug_tensor_dump_output_folder"),
    ("enable_two_batch_overlap", "forward_hooks"),
    ("enable_two_batch_overlap", "offload_group_size"),
)

# (option, its value, other option, the values that go with it)
ALLOWS: tuple[tuple[str, str, str, tuple[Value, ...]], ...] = (
    ("hicache_mem_layout", "page_first_direct", "hicache_io_backend", ("direct", "kernel_ascend")),
    (
        "hicache_storage_backend",
        "mooncake",
        "hicache_mem_layout",
        ("page_first", "page_first_direct", "page_first_kv_split", "page_head"),
    ),
    ("enable_lmcache", "True", "hicache_storage_backend", (None, "lmcache")),
    ("moe_a2a_backend", "flashinfer", "moe_runner_backend", ("flashinfer_cutlass",)),
    ("moe_runner_backend", "flashinfer_cutlass", "quantization", (None, "modelopt_fp4", "modelopt_fp8")),
    (
        "moe_runner_backend",
        "flashinfer_trtllm",
        "quantization",
        (None, "modelopt_fp4", "modelopt_fp8", "fp8", "compressed-tensors"),
    ),
    ("quantization", "mxfp8", "moe_runner_backend", ("auto", "cutlass")),
    ("enable_decode_work_list", "True", "kernel_fusion", ("safe", "all")),
    ("enable_decode_work_list", "True", "decode_attention_backend", ("auto", "triton")),
    ("disaggregation_decode_enable_offload_kvcache", "True", "disaggregation_mode", ("decode",)),
    ("disaggregation_decode_enable_fake_auto", "True", "disaggregation_transfer_backend", ("fake",)),
    ("disaggregation_mode", "prefill", "hicache_write_policy", ("write_through",)),
    ("disaggregation_mode", "prefill", "hicache_storage_backend", (None,)),
    ("disaggregation_mode", "decode", "hicache_storage_backend", (None,)),
    ("encoder_only", "True", "tensor_parallel_size", (1,)),
    ("encoder_only", "True", "pipeline_parallel_size", (1,)),
    ("encoder_only", "True", "enable_multimodal", ("auto", True)),
    ("language_only", "True", "enable_multimodal", ("auto", True)),
    ("language_only", "True", "mm_enable_dp_encoder", (False,)),
    ("load_balance_method", "follow_bootstrap_room", "disaggregation_mode", ("prefill", "decode")),
    ("disaggregation_mode", "prefill", "nnodes", (1,)),
    ("disaggregation_mode", "decode", "nnodes", (1,)),
    ("disaggregation_mode", "prefill", "attention_context_parallel_size", (1,)),
    ("disaggregation_mode", "decode", "attention_context_parallel_size", (1,)),
    ("disaggregation_mode", "decode", "disaggregation_decode_tp", (None,)),
    ("disaggregation_mode", "decode", "disaggregation_decode_dp", (None,)),
    (
        "enable_deterministic_inference",
        "True",
        "attention_backend",
        ("auto", "fa3", "flashinfer", "triton", "torch_native"),
    ),
    ("attention_backend", "flashmla", "page_size", ("auto", 64)),
    ("attention_backend", "cutlass_mla", "page_size", ("auto", 128)),
    ("attention_backend", "trtllm_mla", "page_size", ("auto", 32, 64)),
    ("attention_backend", "trtllm_mha", "page_size", ("auto", 16, 32, 64)),
    ("attention_backend", "trtllm_mla", "kv_cache_dtype", ("auto", "fp8_e4m3", "fp4_e2m1", "bf16")),
    ("attention_backend", "fa3", "kv_cache_dtype", ("auto", "fp8_e4m3", "bf16", "bfloat16")),
    ("attention_backend", "trtllm_mha", "speculative_eagle_topk", ("auto", 1)),
    ("attention_backend", "flex_attention", "speculative_algorithm", (None,)),
    ("speculative_moe_runner_backend", "flashinfer_trtllm", "speculative_algorithm", (None, "NGRAM")),
)

# (option, the option that it must divide); both are numbers
DIVIDES: tuple[tuple[str, str], ...] = (("attention_context_parallel_size", "tensor_parallel_size"),)


def problems(options: Values) -> list[str]:
    """A sentence for every relation that does not hold."""
    return [*_needs(options), *_requires(options), *_excludes(options), *_allows(options), *_divides(options)]


@cache
def _dependent(pattern: str) -> tuple[str, ...]:
    """Names of the options that a pattern of NEEDS means."""
    if pattern.endswith("_"):
        return tuple(row.name for row in rows() if row.name.startswith(pattern))
    return (pattern,)


def _needs(options: Values) -> Iterator[str]:
    for pattern, switches in NEEDS:
        if any(is_set(options, switch) for switch in switches):
            continue
        for name in _dependent(pattern):
            if name in options and name not in switches and is_set(options, name):
                yield (
                    f"{flag(name)} does nothing without {' or '.join(map(flag, switches))}; add it, or leave "
                    f"{flag(name)} out"
                )


def _requires(options: Values) -> Iterator[str]:
    for name, required in REQUIRES:
        if is_set(options, name) and not options[required]:
            yield f"{flag(name)} requires {flag(required)}; add it"


def _excludes(options: Values) -> Iterator[str]:
    for one, other in EXCLUDES:
        if is_set(options, one) and is_set(options, other):
            yield f"{flag(one)} and {flag(other)} exclude one another; leave one out"


def _allows(options: Values) -> Iterator[str]:
    for name, word, other, allowed in ALLOWS:
        if (
            is_set(options, name)
            and (str(options[name]) == word or not word)
            and options[other] not in allowed
        ):
            text = f"{flag(name)} {options[name]}" if word not in ("", "True") else flag(name)
            words = ", ".join("none" if choice is None else str(choice) for choice in allowed)
            yield f"{text} does not go with {flag(other)} {options[other]}; it goes with {words}"


def _divides(options: Values) -> Iterator[str]:
    for name, whole in DIVIDES:
        if options[whole] % options[name]:
            yield (
                f"{flag(name)} {options[name]} does not divide {flag(whole)} {options[whole]}; choose a "
                "divisor"
            )
