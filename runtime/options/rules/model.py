"""Rules on what a model and a device can give: context, logits, hidden states, embeddings."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.groups.model import EMBEDDED_MODEL, MAX_THREADS, NO_LOADER, THREAD_SETTINGS
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag, is_set


def null_timing_needs_the_null_device(options: Values) -> str | None:
    """Options of the null device are set with --device null only."""
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
        if is_set(options, name)
    ]
    if given and options["device"] != "null":
        return f"{', '.join(map(flag, given))} does nothing without --device null; add it, or leave it out"
    return None


def context_within_model(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The context is no longer than the positions that the model was trained for."""
    if plan.model.context_length > model.context_len:
        return (
            f"--context-length {plan.model.context_length} is beyond the model's {model.context_len} tokens; "
            "lower it, or extend the model's rotary positions in config.json"
        )
    return None


def grammars_can_be_masked(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device computes logits that a grammar can mask, and the grammar library takes the wanted
    whitespace."""
    if plan.kernels.grammar_backend != "none" and not device.has_logits:
        return (
            f"--grammar-backend {plan.kernels.grammar_backend} needs logits, which --device {device.name} "
            "does not compute; leave it out"
        )
    if (
        plan.api.constrained_json_whitespace_pattern is not None
        and plan.kernels.grammar_backend == "xgrammar"
    ):
        return (
            "--constrained-json-whitespace-pattern is not possible with --grammar-backend xgrammar; take "
            "llguidance or outlines, or "
            "--constrained-json-disable-any-whitespace"
        )
    return None


def trees_have_grammars(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """A tree of tokens is a mask over logits, as grammars are."""
    if plan.api.tree_decode_config is None:
        return None
    if plan.kernels.grammar_backend == "none":
        return (
            "--tree-decode-config masks tokens as grammars do, and there are none here "
            "(--grammar-backend none); take another --grammar-backend, or leave it out"
        )
    if model.pooling is not None:
        return "--tree-decode-config is of answers, and this model makes vectors; leave it out"
    return None


def processors_have_logits(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Logit processors need a device that computes logits."""
    if plan.api.enable_custom_logit_processor and device.name == "null":
        return (
            "--enable-custom-logit-processor needs logits, and --device null has none; choose another device"
        )
    return None


def hidden_states_are_computed(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Hidden states need a device that computes them, and a model that generates text."""
    if plan.api.enable_return_hidden_states and not device.has_logits:
        return (
            f"--enable-return-hidden-states is not possible: --device {device.name} computes none; choose "
            "another device"
        )
    if plan.api.enable_return_hidden_states and model.pooling is not None:
        return (
            "--enable-return-hidden-states is for models that generate; this one makes vectors of texts by "
            "itself"
        )
    return None


def pooled_texts_stay_whole(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """A model whose pooling needs all tokens of a text at once computes each text in one step, without cached
    prefixes."""
    if model.pooling is None or not model.pooling.is_whole:
        return None
    if plan.schedule.chunked_prefill_size > 0:
        return (
            f"--chunked-prefill-size {plan.schedule.chunked_prefill_size} is not possible: this model must "
            "see all of a text in one step; "
            "leave it out, or set it to -1"
        )
    if plan.tiers.enable_hierarchical_cache:
        return "--enable-hierarchical-cache is not possible: this model uses no cached prefixes; leave it out"
    return None


def embeddings_are_computed(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Embedding models need a device that computes."""
    if model.pooling is not None and not device.has_logits:
        return (
            f"--device {device.name} computes nothing, so it has no vectors; serve a model that generates, "
            "or take --device cpu"
        )
    return None


def transformers_models_are_plain(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Models that transformers' code computes have plain weights on one rank, and are not taken to pieces."""
    if model.transformers_json is None:
        return None
    given = {
        "--tp-size": plan.parallel.tensor_parallel_size > 1,
        "--quantization": plan.precision.quantization is not None,
        "--enable-lora": plan.lora.enable_lora,
        "--enable-fp32-lm-head": plan.precision.enable_fp32_lm_head,
        "--enable-piecewise-cuda-graph": plan.graphs.enable_piecewise_cuda_graph,
        "--enable-torch-compile": plan.graphs.enable_torch_compile,
        "--cpu-offload-gb": plan.memory.cpu_offload_gb > 0,
        "--offload-group-size": plan.memory.offload_group_size > 0,
    }
    wrong = [name for name, has in given.items() if has]
    if wrong:
        return (
            f"{' and '.join(wrong)}: transformers' own code computes this model as a whole on one rank "
            "(--model-impl); leave it out"
        )
    return None


def checksums_are_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--model-checksum without a value has a hub to ask."""
    if plan.model.model_checksum == "" and plan.model.hub_model is None:
        return (
            "--model-checksum without a value takes the checksums of the hub, and --model-path is a folder "
            "of this machine; give a file with checksums"
        )
    return None


def loader_settings_are_known(options: Values) -> str | None:
    """--model-loader-extra-config has settings that the loader knows."""
    given = dict(options["model_loader_extra_config"])
    if not isinstance(given.pop("enable_multithread_load", True), bool):
        return "--model-loader-extra-config: enable_multithread_load is true or false"
    for name, value in given.items():
        if name not in THREAD_SETTINGS:
            return (
                f"--model-loader-extra-config has {name}, which is not known; known are "
                f"{', '.join(THREAD_SETTINGS)} and enable_multithread_load"
            )
        if not isinstance(value, int) or not 1 <= value <= MAX_THREADS:
            return f"--model-loader-extra-config: {name} is a number from 1 to {MAX_THREADS}"
    return None


def load_format_has_a_loader(options: Values) -> str | None:
    """--load-format names a format that is read here."""
    name = options["load_format"]
    return f"--load-format {name} {NO_LOADER[name]}" if name in NO_LOADER else None


def seed_is_named(options: Values) -> str | None:
    """Files of another server come from an address and a port, under a name; without --load-format
    remote_instance these say nothing."""
    ip = "remote_instance_weight_loader_seed_instance_ip"
    port = "remote_instance_weight_loader_seed_instance_service_port"
    missing = [flag(name) for name in (ip, port) if options[name] is None]
    if options["load_format"] == "remote_instance":
        if missing:
            return f"--load-format remote_instance copies the files of a server; give {' and '.join(missing)}"
        if options["model_path"] in EMBEDDED_MODEL:
            return "--load-format remote_instance: give --model-path, under which the model is served"
        return None
    given = [flag(name) for name in (ip, port) if options[name] is not None]
    return f"{given[0]} does nothing without --load-format remote_instance; leave it out" if given else None


def grammars_have_tokens(options: Values) -> str | None:
    """A library for grammars needs the tokenizer."""
    backend = options["grammar_backend"]
    if options["skip_tokenizer_init"] and backend not in ("auto", "none"):
        return f"--grammar-backend {backend} needs a tokenizer, which --skip-tokenizer-init leaves out"
    return None


OPTION_RULES: tuple[OptionRule, ...] = (
    null_timing_needs_the_null_device,
    loader_settings_are_known,
    grammars_have_tokens,
    load_format_has_a_loader,
    seed_is_named,
)

PLAN_RULES: tuple[PlanRule, ...] = (
    context_within_model,
    grammars_can_be_masked,
    trees_have_grammars,
    processors_have_logits,
    hidden_states_are_computed,
    pooled_texts_stay_whole,
    embeddings_are_computed,
    transformers_models_are_plain,
    checksums_are_known,
)
