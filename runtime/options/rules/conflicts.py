"""What options cannot mean together, before model and device are known. Rules that need those stand in
rules.py.

Tables first, then functions that return one sentence which names the flags and the remedy. The rules on
planned options stand here already: they are shown beside the refusal, and are in force when the option starts
to work.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.options.rules import auth as doors
from runtime.options.rules import labels
from runtime.options.table import by_name, rows
from runtime.storage import settings

Said = Mapping[str, Any]  # the value of every option by name: what the user said, or the default

# options that do nothing without another one: a name, or a prefix that ends in _, and what must be set (one
# of several)
NEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("speculative_", ("speculative_algorithm",)),
    ("max_lora_rank", ("enable_lora", "lora_paths")),
    ("lora_target_modules", ("enable_lora", "lora_paths")),
    ("max_loaded_loras", ("enable_lora", "lora_paths")),
    ("enable_lora_overlap_loading", ("enable_lora", "lora_paths")),
    ("hicache_", ("enable_hierarchical_cache", "disaggregation_decode_enable_offload_kvcache")),
    ("hicache_storage_prefetch_policy", ("hicache_storage_backend",)),
    ("hicache_storage_backend_extra_config", ("hicache_storage_backend",)),
    ("prefill_delayer_", ("enable_prefill_delayer",)),
    ("priority_scheduling_", ("enable_priority_scheduling",)),
    ("logit_processors", ("enable_custom_logit_processor",)),
    ("isolate_tenants", ("fair_share",)),
    ("ssl_", ("ssl_certfile",)),
    ("schedule_low_priority_values_first", ("enable_priority_scheduling",)),
    ("eplb_", ("enable_eplb",)),
    ("export_metrics_to_file_dir", ("export_metrics_to_file",)),
    ("otlp_traces_endpoint", ("enable_trace",)),
    ("enable_dp_lm_head", ("enable_dp_attention",)),
    ("nsa_prefill_cp_mode", ("enable_nsa_prefill_context_parallel",)),
    ("log_requests_level", ("log_requests", "crash_dump_folder")),
    ("uvicorn_access_log_exclude_prefixes", ("log_level_http",)),
    ("log_requests_format", ("log_requests",)),
    ("log_requests_target", ("log_requests",)),
    ("expert_distribution_recorder_buffer_size", ("expert_distribution_recorder_mode",)),
    ("torch_compile_max_bs", ("enable_torch_compile",)),
    ("enable_torch_compile_debug_mode", ("enable_torch_compile", "piecewise_cuda_graph_compiler")),
    ("piecewise_cuda_graph_", ("enable_piecewise_cuda_graph",)),
    ("prompt_tokens_buckets", ("collect_tokens_histogram",)),
    ("generation_tokens_buckets", ("collect_tokens_histogram",)),
    ("enable_prefix_mm_cache", ("encoder_only",)),
    ("dllm_algorithm_config", ("dllm_algorithm",)),
    ("tbo_token_distribution_threshold", ("enable_two_batch_overlap",)),
    ("enable_two_batch_overlap", ("moe_a2a_backend",)),
    ("deepep_mode", ("moe_a2a_backend",)),
    ("enable_weights_cpu_backup", ("enable_memory_saver",)),
    ("offload_num_in_group", ("offload_group_size",)),
    ("offload_prefetch_step", ("cpu_offload_gb", "offload_group_size")),
)

# options that must be given when another one is
REQUIRES: tuple[tuple[str, str], ...] = (
    ("export_metrics_to_file", "export_metrics_to_file_dir"),
    ("language_only", "encoder_urls"),
    ("tokenizer_metrics_allowed_custom_labels", "tokenizer_metrics_custom_labels_header"),
)

# pairs that exclude one another
EXCLUDES: tuple[tuple[str, str], ...] = (
    ("enable_hierarchical_cache", "disable_radix_cache"),
    ("kv_events_config", "disable_radix_cache"),
    ("encoder_only", "language_only"),
    ("encoder_only", "disaggregation_mode"),
    ("dllm_algorithm", "enable_lora"),
    ("cpu_offload_gb", "offload_group_size"),
    ("enable_weights_cpu_backup", "cpu_offload_gb"),
    ("enable_weights_cpu_backup", "offload_group_size"),
    ("enable_piecewise_cuda_graph", "cpu_offload_gb"),
    ("enable_piecewise_cuda_graph", "offload_group_size"),
    ("dllm_algorithm", "disaggregation_mode"),
)

# (option, its value, other option, the values that go with it)
ALLOWS: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("hicache_mem_layout", "page_first_direct", "hicache_io_backend", ("direct", "kernel_ascend")),
    (
        "hicache_storage_backend",
        "mooncake",
        "hicache_mem_layout",
        ("page_first", "page_first_direct", "page_first_kv_split", "page_head"),
    ),
    ("moe_a2a_backend", "flashinfer", "moe_runner_backend", ("flashinfer_cutlass",)),
    ("moe_runner_backend", "flashinfer_cutlass", "quantization", (None, "modelopt_fp4", "modelopt_fp8")),
    (
        "moe_runner_backend",
        "flashinfer_trtllm",
        "quantization",
        (None, "modelopt_fp4", "modelopt_fp8", "fp8", "compressed-tensors"),
    ),
    ("quantization", "mxfp8", "moe_runner_backend", ("auto", "cutlass")),
    ("elastic_ep_backend", "mooncake", "eplb_algorithm", ("auto", "elasticity_aware")),
    ("disaggregation_decode_enable_offload_kvcache", "True", "disaggregation_mode", ("decode",)),
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
DIVIDES: tuple[tuple[str, str], ...] = (
    ("attention_context_parallel_size", "tensor_parallel_size"),
    ("moe_data_parallel_size", "tensor_parallel_size"),
)


def broken(said: Said) -> list[str]:
    """A sentence for everything that does not go together."""
    tables = (*_needs(said), *_requires(said), *_excludes(said), *_allows(said), *_divides(said))
    return [*tables, *(problem for rule in RULES if (problem := rule(said)))]


def flag(name: str) -> str:
    return by_name()[name].flag


def is_set(said: Said, name: str) -> bool:
    """Whether an option asks for anything: it is neither its default nor off."""
    return said[name] != by_name()[name].default and said[name] not in (False, None, "none", "null", "")


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern) if pattern.endswith("_") else name == pattern


def _needs(said: Said) -> Iterator[str]:
    for pattern, switches in NEEDS:
        if any(is_set(said, switch) for switch in switches):
            continue
        for row in rows():
            if (
                row.name in said
                and _matches(row.name, pattern)
                and row.name not in switches
                and is_set(said, row.name)
            ):
                yield f"{row.flag} does nothing without {' or '.join(map(flag, switches))}; add it, or leave {row.flag} out"


def _requires(said: Said) -> Iterator[str]:
    for name, required in REQUIRES:
        if is_set(said, name) and not said[required]:
            yield f"{flag(name)} requires {flag(required)}; add it"


def _excludes(said: Said) -> Iterator[str]:
    for one, other in EXCLUDES:
        if is_set(said, one) and is_set(said, other):
            yield f"{flag(one)} and {flag(other)} exclude one another; leave one out"


def _allows(said: Said) -> Iterator[str]:
    for name, word, other, allowed in ALLOWS:
        if is_set(said, name) and (str(said[name]) == word or not word) and said[other] not in allowed:
            text = f"{flag(name)} {said[name]}" if word not in ("", "True") else flag(name)
            words = ", ".join("none" if choice is None else str(choice) for choice in allowed)
            yield f"{text} does not go with {flag(other)} {said[other]}; it goes with {words}"


def _divides(said: Said) -> Iterator[str]:
    for name, whole in DIVIDES:
        if said[whole] % said[name]:
            yield f"{flag(name)} {said[name]} does not divide {flag(whole)} {said[whole]}; choose a divisor"


def served_name_has_no_colon(said: Said) -> str | None:
    """MODEL:ADAPTER names an adapter in requests."""
    if ":" in said["served_model_name"]:
        return f"--served-model-name {said['served_model_name']} holds a colon, which stands between model and adapter; choose another name"
    return None


def null_timing_needs_the_null_device(said: Said) -> str | None:
    given = [
        name
        for name in (
            "null_step_s",
            "null_token_s",
            "null_vocab_size",
            "null_first_token",
            "null_poison_token",
            "null_poison",
        )
        if is_set(said, name)
    ]
    if given and said["device"] != "null":
        return f"{', '.join(map(flag, given))} does nothing without --device null; add it, or leave it out"
    return None


def nodes_divide_ranks(said: Said) -> str | None:
    ranks = said["tensor_parallel_size"] * said["pipeline_parallel_size"]
    if ranks % said["nnodes"]:
        return (
            f"--nnodes {said['nnodes']} does not divide the {ranks} ranks of --tensor-parallel-size times --pipeline-parallel-size; "
            "each node takes as many"
        )
    return None


def node_is_one_of_them(said: Said) -> str | None:
    if said["node_rank"] >= said["nnodes"]:
        return f"--node-rank {said['node_rank']} is none of the {said['nnodes']} nodes of --nnodes; they are numbered from 0"
    if said["nnodes"] > 1 and said["dist_init_addr"] is None:
        return "--nnodes above 1 requires --dist-init-addr, where the nodes meet; give the address of the first one"
    return None


def attention_replicas_divide_ranks(said: Said) -> str | None:
    """With attention in replicas the ranks of tensor parallelism are divided among them and the parts of a
    sequence."""
    replicas, parts, ranks = (
        said["data_parallel_size"],
        said["attention_context_parallel_size"],
        said["tensor_parallel_size"],
    )
    if not said["enable_dp_attention"]:
        return None
    if replicas == 1:
        return "--enable-dp-attention does nothing with one replica; give --data-parallel-size above 1, or leave it out"
    if ranks % (replicas * parts):
        return (
            f"--data-parallel-size {replicas} times --attention-context-parallel-size {parts} does not divide "
            f"--tensor-parallel-size {ranks}; choose sizes that do"
        )
    return None


def experts_fit_ranks(said: Said) -> str | None:
    """Experts are spread over all ranks, or over those of one of their replicas."""
    experts, replicas, ranks = (
        said["expert_parallel_size"],
        said["moe_data_parallel_size"],
        said["tensor_parallel_size"],
    )
    if experts > 1 and replicas > 1 and experts * replicas != ranks:
        return (
            f"--expert-parallel-size {experts} times --moe-data-parallel-size {replicas} must be "
            f"--tensor-parallel-size {ranks}; change one of them"
        )
    if experts > 1 and ranks % experts:
        return f"--expert-parallel-size {experts} does not divide --tensor-parallel-size {ranks}; choose a divisor"
    if said["moe_a2a_backend"] != "none" and experts not in (1, ranks):
        return (
            f"--moe-a2a-backend {said['moe_a2a_backend']} spreads experts over all ranks; leave --expert-parallel-size out "
            f"or give {ranks}"
        )
    if said["moe_runner_backend"] == "cutlass" and said["quantization"] in ("fp8", "mxfp8") and experts > 1:
        return f"--moe-runner-backend cutlass has no {said['quantization']} with --expert-parallel-size above 1; choose another runner"
    return None


def balancing_needs_spread_experts(said: Said) -> str | None:
    if said["enable_eplb"] and said["expert_parallel_size"] == 1 and said["moe_a2a_backend"] == "none":
        return "--enable-eplb has nothing to balance on one rank; give --expert-parallel-size above 1"
    return None


def drafts_are_fully_described(said: Said) -> str | None:
    """The three numbers of a draft are chosen together, or all left to the runtime."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    numbers = [said[name] for name in names]
    if (
        said["speculative_algorithm"] not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
        or numbers.count("auto") == 3
    ):
        return None
    if "auto" in numbers:
        return f"{', '.join(map(flag, names))} are chosen together; give all three, or none of them"
    steps, branches, tokens = numbers
    if branches == 1 and tokens != steps + 1:
        return (
            f"--speculative-num-draft-tokens {tokens} does not go with one branch and --speculative-num-steps {steps}; "
            f"it must be {steps + 1}"
        )
    return None


def drafts_have_a_model(said: Said) -> str | None:
    if (
        said["speculative_algorithm"] in ("EAGLE3", "STANDALONE")
        and said["speculative_draft_model_path"] is None
    ):
        return f"--speculative-algorithm {said['speculative_algorithm']} needs a draft model; give --speculative-draft-model-path"
    return None


def branches_need_kernels(said: Said) -> str | None:
    """The branches of a draft share pages that only some kernels can take apart."""
    branches, page, kernels = said["speculative_eagle_topk"], said["page_size"], said["attention_backend"]
    if (
        "auto" not in (branches, page)
        and branches > 1
        and page > 1
        and kernels not in ("auto", "flashinfer", "fa3")
    ):
        return (
            f"--speculative-eagle-topk {branches} with --page-size {page} does not go with --attention-backend {kernels}; "
            "take flashinfer or fa3"
        )
    return None


def adapters_are_described(said: Said) -> str | None:
    if said["lora_paths"] and said["enable_lora"] is False:
        return "--lora-paths does nothing with --no-enable-lora; leave one out"
    if (
        said["enable_lora"] is True
        and not said["lora_paths"]
        and not (said["max_lora_rank"] and said["lora_target_modules"])
    ):
        return "--enable-lora without --lora-paths requires --max-lora-rank and --lora-target-modules, to know how much room adapters take"
    if (
        said["lora_target_modules"]
        and "all" in said["lora_target_modules"]
        and len(said["lora_target_modules"]) > 1
    ):
        return "--lora-target-modules all stands alone; leave the other names out"
    return None


def adapters_see_all_tokens(said: Said) -> str | None:
    """Ranks that exchange tokens compute shared experts of some of them only."""
    if said["lora_paths"] or said["enable_lora"] is True:
        if said["moe_a2a_backend"] != "none":
            return f"adapters do not go with --moe-a2a-backend {said['moe_a2a_backend']}; leave one out"
    return None


def adapters_fit(said: Said) -> str | None:
    loaded, mixed, paths = said["max_loaded_loras"], said["max_loras_per_batch"], said["lora_paths"] or ()
    if loaded is None:
        return None
    if loaded < mixed:
        return f"--max-loaded-loras {loaded} is below --max-loras-per-batch {mixed}; raise it"
    if len(paths) > loaded:
        return f"--lora-paths names {len(paths)} adapters, but --max-loaded-loras is {loaded}; raise it"
    return None


def transfer_sizes_divide(said: Said) -> str | None:
    """Pages move between ranks whose shares of the heads nest."""
    here, there = said["tensor_parallel_size"], said["disaggregation_decode_tp"]
    if said["disaggregation_mode"] == "prefill" and there is not None and here % there and there % here:
        return f"--disaggregation-decode-tp {there} and --tensor-parallel-size {here} must be multiples of one another; change one"
    return None


def multiplexing_stands_alone(said: Said) -> str | None:
    if not said["enable_pdmux"]:
        return None
    if said["pipeline_parallel_size"] > 1 or said["disaggregation_mode"] != "null":
        return "--enable-pdmux goes with neither --pipeline-parallel-size above 1 nor --disaggregation-mode; leave one out"
    return None


def limits_name_media(said: Said) -> str | None:
    unknown = sorted(set(said["limit_mm_data_per_request"] or ()) - {"image", "video", "audio"})
    if unknown:
        return f"--limit-mm-data-per-request knows image, video and audio, not {', '.join(unknown)}; leave it out"
    return None


def bounds_have_a_form(said: Said) -> str | None:
    problems = [
        f"{flag(name)} {problem}"
        for name in ("prompt_tokens_buckets", "generation_tokens_buckets")
        if (problem := _bounds_problem(said[name] or ("default",)))
    ]
    return "; ".join(problems) or None


def _bounds_problem(words: tuple[str, ...]) -> str | None:
    """`default`, `tse MIDDLE BASE COUNT` (exponential on both sides of the middle) or `custom BOUND ...`."""
    form, rest = words[0], words[1:]
    try:
        numbers = [float(word) for word in rest]
    except ValueError:
        return f"takes numbers after {form}, not {' '.join(rest)}"
    if form == "default":
        return "takes nothing after default" if rest else None
    if form == "tse":
        is_right = len(numbers) == 3 and numbers[0] > 0 and numbers[1] > 1 and numbers[2] >= 1
        return None if is_right else "takes a middle above 0, a base above 1 and a count after tse"
    if form == "custom":
        is_right = bool(numbers) and len(set(numbers)) == len(numbers) and min(numbers) >= 0
        return None if is_right else "takes different bounds of 0 and above after custom"
    return f"begins with default, tse or custom, not with {form}"


def states_align_with_pages(said: Said) -> str | None:
    interval, page, drafts = (
        said["mamba_track_interval"],
        said["page_size"],
        said["speculative_num_draft_tokens"],
    )
    if said["mamba_scheduler_strategy"] != "extra_buffer":
        return None
    if page != "auto" and interval % page:
        return f"--mamba-track-interval {interval} is no multiple of --page-size {page}; choose one"
    if drafts != "auto" and interval < drafts:
        return f"--mamba-track-interval {interval} is below --speculative-num-draft-tokens {drafts}; raise it"
    return None


def storage_settings_are_known(said: Said) -> str | None:
    if said["hicache_storage_backend"] is None:
        return None
    wrong = settings.problem(said["hicache_storage_backend"], said["hicache_storage_backend_extra_config"])
    return f"{flag('hicache_storage_backend_extra_config')} {wrong}" if wrong else None


RULES: tuple[Callable[[Said], str | None], ...] = (
    served_name_has_no_colon,
    null_timing_needs_the_null_device,
    nodes_divide_ranks,
    node_is_one_of_them,
    attention_replicas_divide_ranks,
    experts_fit_ranks,
    balancing_needs_spread_experts,
    drafts_are_fully_described,
    drafts_have_a_model,
    branches_need_kernels,
    adapters_are_described,
    adapters_fit,
    adapters_see_all_tokens,
    transfer_sizes_divide,
    multiplexing_stands_alone,
    limits_name_media,
    bounds_have_a_form,
    states_align_with_pages,
    labels.labels_have_names,
    doors.keys_fit_a_header,
    doors.root_path_is_a_path,
    doors.grpc_serves_no_http,
    storage_settings_are_known,
)

# Cross-checks of the reference that this design has removed: what they forbid there is possible here.
REMOVED: tuple[tuple[str, str], ...] = (
    (
        "pipeline parallelism excludes the overlap schedule",
        "how many steps are in flight does not depend on what ranks do",
    ),
    (
        "pipeline parallelism excludes speculation and mixed chunks",
        "a plan's rows are tokens; the stages are not seen",
    ),
    ("pipeline parallelism excludes context parallelism", "both only divide ranks"),
    (
        "speculation turns the overlap schedule off",
        "accepted tokens stay on the device as the next step's input",
    ),
    ("speculation turns mixed chunks off", "a verify step is a row of several tokens beside other rows"),
    (
        "standalone and n-gram drafts exclude data-parallel attention",
        "the steps of all replicas are planned in one place",
    ),
    ("n-gram drafts need CUDA", "they are made on the host"),
    ("adapters exclude draft models", "an adapter belongs to a sequence, drafts as well"),
    ("the chunk size must be a multiple of the page size", "a chunk may end within a page"),
    ("a decode server has no prefix cache", "pages that arrived are shared like any others"),
    (
        "Mamba without extra buffers turns the overlap schedule off",
        "states are saved by the step that needs them",
    ),
    ("diffusion models turn the overlap schedule off", "they are steps like others"),
    ("grammars hold the overlap schedule up", "a mask may arrive after the forward pass was submitted"),
    ("two tokenizer batching modes exclude one another", "there is one way to tokenize"),
    ("multiplexing excludes chunks and the overlap schedule", "both are properties of plans"),
    (
        "data-parallel replicas over several nodes need data-parallel attention",
        "one process plans for all replicas",
    ),
    ("data-parallel attention divides the chunk size", "the chunk size is a step's, of all replicas"),
)
