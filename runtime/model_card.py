"""What clients may know of the served model, as the options and config.json say it."""

import time
from collections import Counter

from runtime.diffusion_settings import model_defaults
from runtime.messages.weight_facts import WeightFacts
from runtime.models.config.gguf.container import is_gguf
from runtime.models.config.media_config import encoder_bytes
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.quantization_schemes import Ggml
from runtime.options.model_sizes import weight_count
from runtime.options.plan import Plan
from runtime.parsing.detect import AnswerFormats
from runtime.service import ModelCard
from runtime.settings import grammar_setup, limits, preferred_sampling

PLAIN = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # dtypes, as Ollama writes them


def model_card(plan: Plan, model: ModelConfig, formats: AnswerFormats) -> ModelCard:
    """What clients may know of the served model, without adapters. Raises OptionsError."""
    preferred, has_defaults = preferred_sampling(plan), plan.api.sampling_defaults == "model"
    return ModelCard(
        name=plan.api.served_model_name,
        created=int(time.time()),
        limits=limits(plan, model, plan.model.context_length),
        sampling_defaults=(model_defaults(model) if has_defaults else {}) | preferred,
        preferred=preferred,
        pooling=model.pooling,
        formats=formats,
        has_grammars=grammar_setup(plan, model) is not None and plan.api.tree_decode_config is None,
        weight_version=plan.weights.weight_version,
        storage=plan.tiers.hicache_storage_backend,
        has_cache_report=plan.api.enable_cache_report,
        adapters={},
        weights=weight_facts(plan, model),
        reads_items_apart=plan.api.multi_item_scoring_delimiter is not None,
    )


def weight_facts(plan: Plan, model: ModelConfig) -> WeightFacts:
    """Number and form of the weights."""
    # of a model that transformers' code computes, config.json does not say it all
    is_known = model.transformers_json is None
    count = weight_count(model, 1) + encoder_bytes(model.media, 1) if is_known else 0
    file_format = "gguf" if is_gguf(plan.model.model_path) else "safetensors"
    return WeightFacts(num_weights=count, level=_level(plan, model), format=file_format)


def _level(plan: Plan, model: ModelConfig) -> str:
    """The quantization, or the dtype of weights that are not quantized; of GGUF's types that which most
    matrices have."""
    if model.quantization is None:
        return PLAIN.get(plan.precision.dtype, plan.precision.dtype)
    types = Counter(
        name
        for one in model.quantization.modules.values()
        if one is not None and isinstance(one.scheme, Ggml)
        for _, name in one.scheme.types
    )
    return types.most_common(1)[0][0] if types else model.quantization.method.upper()
