"""From the plan to the configuration of each part of the runtime."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import msgspec
from msgspec import Struct

from runtime import log
from runtime.cache.kv import CacheConfig
from runtime.cache.states import StateConfig
from runtime.cache.window import WindowConfig
from runtime.diffusion_settings import diffusion
from runtime.encoding_settings import encoding_config
from runtime.errors import OptionsError
from runtime.grammar.backend import GrammarError
from runtime.grammar.token_tree import read_token_tree
from runtime.host_settings import host_config, reserved_tokens
from runtime.json_value import Fields
from runtime.messages.constraint import GrammarSetup, TreeRule
from runtime.messages.lora import AdapterSetup
from runtime.messages.ranks import StartRank, StepOverlap
from runtime.messages.sampling import MAX_TOP_LOGPROBS, Limits, SamplingParams
from runtime.metrics.table import Buckets
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.patch_image_config import pixel_ranges
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.nodes.addresses import node_environment
from runtime.options.captures import compiled, graph_sizes, piecewise_sizes
from runtime.options.facts import device_facts
from runtime.options.groups.precision import requested_quantization
from runtime.options.plan import Plan
from runtime.parsing.detect import AnswerFormats, select_formats
from runtime.pdmux_settings import multiplexing
from runtime.scheduling.admission import Admission
from runtime.scheduling.deadlines import Limit
from runtime.scheduling.expert_location import places_at_start
from runtime.scheduling.lora_slots import LoraSlotConfig
from runtime.scheduling.micro_batches import MicroBatches
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.scheduling.waiting import OrderConfig
from runtime.text.builtin_templates import template_sources
from runtime.text.chat_template import ChatTemplates
from runtime.text.infill import find_format
from runtime.text.media_prompts import MediaProcessor
from runtime.text.open_media import open_processor
from runtime.text.open_templates import chat_templates
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import IdsOnly, Vocabulary
from runtime.weight_settings import cache_scales, keep_weights, reading, weight_offload


def start_rank(
    plan: Plan, model: ModelConfig, adapters: AdapterSetup | None = None, replica: int = 0
) -> StartRank:
    """The first message to a replica's ranks. May make a temporary folder (--enable-profile-cuda-graph)."""
    return StartRank(
        device=plan.parallel.device,
        model_path=plan.model.model_path,
        dtype=plan.precision.dtype,
        load_format=plan.model.load_format,
        **plan.parallel.of_ranks(replica, has_group_heads=plan.has_group_heads),
        prompt_split=plan.prompt_split,
        steps_in_flight=plan.steps_in_flight,
        replicates_dense=plan.replicates_dense,
        scatters_inputs=plan.parallel.enable_attn_tp_input_scattered,
        ep_size=plan.experts.expert_parallel_size,
        expert_places=places_at_start(plan.experts, model.moe, plan.parallel.nodes_of_stage),
        page_size=plan.memory.page_size,
        moe_a2a_backend=plan.experts.moe_a2a_backend,
        deepep_mode=plan.experts.deepep_mode,
        overlap=step_overlap(plan),
        max_slots=plan.schedule.max_running_requests,
        max_len=plan.model.context_length,
        max_step_tokens=plan.schedule.max_step_tokens + plan.schedule.max_running_requests,
        memory_fraction=plan.memory.mem_fraction_static,
        max_total_tokens=plan.memory.max_total_tokens,
        seed=plan.schedule.random_seed,
        device_options=plan.device_options,
        multiplexing=multiplexing(plan),
        environment=node_environment(plan.parallel) | plan.rank_environment,
        window_ratio=plan.memory.window_ratio,
        **plan.states.of_ranks,
        host_bytes=plan.tiers.hicache_size * 10**9 if plan.tiers.enable_hierarchical_cache else 0,
        host_ratio=plan.tiers.hicache_ratio if plan.tiers.enable_hierarchical_cache else 0.0,
        host_layout=plan.tiers.hicache_mem_layout,
        kv_dtype=plan.precision.kv_cache_dtype,
        grammar=grammar_setup(plan, model),
        processors=plan.api.logit_processors if plan.api.enable_custom_logit_processor else [],
        graph_sizes=graph_sizes(plan, model),
        graph_pads=not plan.graphs.disable_cuda_graph_padding,
        piecewise_sizes=piecewise_sizes(plan),
        compiled=compiled(plan),
        trace_folder=mkdtemp(prefix="runtime-captures-") if plan.graphs.enable_profile_cuda_graph else "",
        adapters=adapters,
        offload_setup=weight_offload(plan),
        expert_steps=plan.expert_steps,
        reports_experts=plan.api.enable_return_routed_experts,
        config_overrides=plan.model.json_model_override_args,
        model_impl=plan.model.model_impl,
        has_wide_head=plan.precision.enable_fp32_lm_head,
        encoding=plan.encoding,
        is_embedding=plan.model.is_embedding,
        pooling=plan.model.pooling,
        quantization=requested_quantization(plan.precision),
        kept_weights=keep_weights(plan),
        reading=reading(plan),
        weight_functions=plan.weights.custom_weight_loader or (),
        config_file=plan.weights.decrypted_config_file,
        cache_scales=cache_scales(plan, model),
        log_level=log.level(),
        log_format=plan.logs.log_format,
        speculation=plan.speculation.in_force,
        diagnosis=plan.debug.in_force,
    )


def step_overlap(plan: Plan) -> StepOverlap:
    """What ranks compute while they exchange something."""
    kernels = plan.kernels
    return StepOverlap(
        kernels.enable_two_batch_overlap,
        kernels.tbo_token_distribution_threshold,
        kernels.enable_single_batch_overlap,
    )


def buckets(plan: Plan) -> Buckets:
    """Bounds of the histograms."""
    return Buckets(
        delay_steps=plan.schedule.prefill_delayer_forward_passes_buckets,
        delay_s=plan.schedule.prefill_delayer_wait_seconds_buckets,
        ttft_s=plan.observe.bucket_time_to_first_token,
        itl_s=plan.observe.bucket_inter_token_latency,
        e2e_s=plan.observe.bucket_e2e_request_latency,
        prompt_length=bounds_of(plan.observe.prompt_tokens_buckets),
        answer_length=bounds_of(plan.observe.generation_tokens_buckets),
    )


def bounds_of(words: tuple[str, ...] | None) -> tuple[float, ...] | None:
    """Histogram bounds of --prompt-tokens-buckets; None: the usual ones. `tse`: half of the bounds on each
    side of a middle, at distances that are powers of a base."""
    form, *rest = words or ("default",)
    if form == "default":
        return None
    numbers = tuple(map(float, rest))
    if form == "custom":
        return numbers
    middle, base, count = numbers
    steps = [base**i for i in range(1, math.ceil(count / 2) + 1)]
    return (middle, *(middle + step for step in steps), *(max(0.0, middle - step) for step in steps))


def grammar_setup(plan: Plan, model: ModelConfig) -> GrammarSetup | None:
    """What compiles grammars; None: no structured outputs."""
    if plan.kernels.grammar_backend == "none":
        return None
    return GrammarSetup(
        backend=plan.kernels.grammar_backend,
        tokenizer_path=plan.model.tokenizer_path,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        whitespace_pattern=plan.api.constrained_json_whitespace_pattern,
        is_compact=plan.api.constrained_json_disable_any_whitespace,
        jumps=not plan.api.disable_jump_forward,
    )


class TextSetup(Struct, frozen=True):
    """The tokenizer, and how chats, infills and answers are written."""

    vocabulary: Vocabulary
    templates: ChatTemplates
    infill_format: str | None  # None: the model has no tokens for infills
    formats: AnswerFormats
    media: MediaProcessor | None = None  # None: the model takes text alone
    tree: TreeRule | None = None  # what all answers follow; None: what their requests say


def open_text(plan: Plan, model: ModelConfig) -> TextSetup:
    """Reads the tokenizer and the templates. Raises OptionsError, ModelError."""
    if plan.model.skip_tokenizer_init:
        vocabulary: Vocabulary = IdsOnly(model.vocab_size)
    else:
        padded = 0 if model.dual is None else model.dual.padded
        vocabulary = Vocabulary.load(Path(plan.model.tokenizer_path), model.vocab_size, padded)
    pixels = pixel_ranges(plan.multimodal.mm_process_config)
    media = open_processor(Path(plan.model.model_path), model.media, vocabulary, pixels)
    marks = {} if media is None else media.placeholder_ids
    templates = chat_templates(vocabulary, plan.api.chat_template, plan.api.hf_chat_template_name, marks)
    infill_format = find_format(
        plan.api.completion_template, lambda token: vocabulary.token_id(token) is not None
    )
    formats, tree = answer_formats(plan, vocabulary.files), tree_rule(plan, model)
    return TextSetup(vocabulary, templates, infill_format, formats, media, tree)


def tree_rule(plan: Plan, model: ModelConfig) -> TreeRule | None:
    """What all answers follow (--tree-decode-config), read and checked. Raises OptionsError."""
    if plan.api.tree_decode_config is None:
        return None
    path = Path(plan.model.model_path).absolute() / plan.api.tree_decode_config
    try:
        return TreeRule(str(path), read_token_tree(path, model.vocab_size).end_token_id)
    except GrammarError as error:
        raise OptionsError([str(error)]) from None


def model_config(plan: Plan) -> ModelConfig:
    """Reads config.json, for what the device computes. Raises ModelError."""
    model = read_config(
        plan.model.model_path,
        is_embedding=plan.model.is_embedding,
        pooling=plan.model.pooling,
        quantization=requested_quantization(plan.precision),
        overrides=plan.model.json_model_override_args,
        config_file=plan.weights.decrypted_config_file,
        model_impl=plan.model.model_impl,
        takes_media=plan.model.enable_multimodal,
    )
    if model.quantization is None:
        return model
    schemes = device_facts(plan.parallel.device).schemes
    return msgspec.structs.replace(model, quantization=model.quantization.on_device(schemes))


def answer_formats(plan: Plan, files: TokenizerFiles) -> AnswerFormats:
    """How the model writes tool calls and reasoning. Raises OptionsError, ModelError."""
    choice, name = plan.api.chat_template, plan.api.hf_chat_template_name
    sources = template_sources(files.templates, choice, name).by_name
    return select_formats(
        plan.api.tool_call_parser,
        plan.api.reasoning_parser,
        sources.get("tool_use", "") + sources.get("default", ""),
    )


def lora_slots(plan: Plan) -> LoraSlotConfig:
    """Slots of adapters, and which of them is given up first."""
    count = plan.lora.max_loras_per_batch if plan.lora.enable_lora else 0
    return LoraSlotConfig(num_lora_slots=count, eviction=plan.lora.lora_eviction_policy)


def scheduler_config(
    plan: Plan,
    model: ModelConfig,
    num_pages: int,
    num_host_pages: int = 0,
    num_window_pages: int = 0,
    num_state_slots: int = 0,
    num_host_states: int = 0,
    *,
    replica: int = 0,
    num_replicas: int = 1,
) -> SchedulerConfig:
    """What a scheduler must know of the plan; the numbers of pages are those of its smallest rank."""
    return SchedulerConfig(
        replica=replica,
        num_replicas=num_replicas,
        max_running=plan.schedule.max_running_requests,
        max_step_tokens=plan.schedule.max_step_tokens,
        max_len=plan.model.context_length,
        page_size=plan.memory.page_size,
        num_pages=num_pages,
        eos_ids=model.eos_ids,
        pools=model.pooling is not None,
        diffusion=diffusion(plan, model),
        encodings=encoding_config(model),
        lora_slots=lora_slots(plan),
        cache=CacheConfig(
            shares=not (
                plan.memory.disable_radix_cache
                or model.needs_whole_texts
                or isinstance(model.media, WhisperEncoder)
            ),
            eviction=plan.memory.radix_eviction_policy,
            window=WindowConfig(
                num_pages=num_window_pages,
                window=max(1, *model.windows),
                step_tokens=plan.schedule.max_step_tokens,
            ),
            states=StateConfig(
                num_slots=num_state_slots,
                shares=not plan.memory.disable_radix_cache,
                interval=plan.states.state_interval,
                draft_nodes=plan.draft_nodes,
            ),
            host=host_config(plan, num_host_pages, num_host_states),
        ),
        conservativeness=plan.schedule.schedule_conservativeness,
        reserved_tokens=reserved_tokens(plan),
        limit=Limit(queue_s=plan.schedule.queue_timeout, total_s=plan.schedule.request_timeout),
        order=OrderConfig(
            policy=plan.schedule.schedule_policy,
            has_priorities=has_priorities(plan),
            low_first=plan.schedule.schedule_low_priority_values_first,
            preemption_threshold=plan.schedule.priority_scheduling_preemption_threshold,
            patience=plan.schedule.max_overtakes,
            fair=plan.schedule.fair_share != "off",
            weights=_weights(plan),
        ),
        micro_batches=MicroBatches(plan.parallel.micro_batches, plan.parallel.pp_max_micro_batch_size),
        admission=Admission(
            max_step_tokens=plan.schedule.max_step_tokens,
            max_prompts=plan.schedule.prefill_max_requests,
            has_chunks=plan.schedule.chunked_prefill_size > 0,
            has_dynamic_chunks=plan.schedule.enable_dynamic_chunking,
            max_step_s=plan.schedule.max_step_ms / 1000,
            long_share=plan.schedule.long_prompt_share,
            decode_steps=plan.schedule.num_continuous_decode_steps,
            delay_steps=plan.delay_steps,
            delay_watermark=plan.schedule.prefill_delayer_token_usage_low_watermark,
        ),
    )


def _weights(plan: Plan) -> dict[str, float]:
    """Weights of tenants, which are numbers as the rules require."""
    return {t: w for t, w in plan.schedule.fair_share_weights.items() if isinstance(w, int | float)}


def preferred_sampling(plan: Plan) -> Fields:
    """Fields of SamplingParams from --preferred-sampling-params. Raises OptionsError."""
    preferred = plan.api.preferred_sampling_params or {}
    try:
        msgspec.convert(preferred, SamplingParams)
    except msgspec.ValidationError as error:
        raise OptionsError(
            [f"--preferred-sampling-params: {error}; its names are those of sampling_params of /generate"]
        ) from None
    return preferred


def has_priorities(plan: Plan) -> bool:
    """Whether requests are scheduled by priority."""
    return plan.schedule.enable_priority_scheduling or plan.schedule.schedule_policy == "priority"


def limits(plan: Plan, model: ModelConfig, pool_tokens: int) -> Limits:
    """Limits of requests; `pool_tokens`: most tokens of a sequence that the KV pages hold."""
    return Limits(
        vocab_size=model.vocab_size,
        context_len=plan.model.context_length,
        pool_tokens=pool_tokens,
        cuts=plan.api.allow_auto_truncate,
        processors=processor_names(plan),
        min_new=1 if model.pooling is None else 0,
        hidden_size=model.hidden_size,
        shows_hidden=plan.api.enable_return_hidden_states,
        routed_size=routed_size(plan, model),
        max_logprobs=MAX_TOP_LOGPROBS if plan.api.max_logprobs == -1 else plan.api.max_logprobs,
        max_response_bytes=plan.http.max_response_bytes,
        media_kinds=frozenset() if model.media is None else model.media.kinds,
        fills_blocks=model.diffusion is not None,
    )


def routed_size(plan: Plan, model: ModelConfig) -> int:
    """Routed experts of a token in all layers; 0: they are not reported."""
    moe = model.moe if plan.api.enable_return_routed_experts else None
    return 0 if moe is None else len(moe.layers) * moe.routing.top_k


def processor_names(plan: Plan) -> tuple[str, ...]:
    """Names of the logit processors in requests: those of their classes."""
    paths = plan.api.logit_processors if plan.api.enable_custom_logit_processor else ()
    return tuple(path.rpartition(":")[2] for path in paths)


def random_seeds(seed: int) -> Callable[[], int]:
    """A source of seeds for requests without one: the same, in order, for the same --random-seed."""
    return partial(Random(seed).getrandbits, 63)
