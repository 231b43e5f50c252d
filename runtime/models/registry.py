"""Which class serves which architecture: a table from the name in config.json to `module:Class`. Torch-free.

A new family is a file beside this one and a row here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from runtime.errors import ModelError

if TYPE_CHECKING:
    from runtime.models.base import Model

POOLED = ("Model", "ForSequenceClassification")  # tops of models that make vectors or scores

POOLS = ("runtime.models.llama:Llama", "runtime.models.bert:Bert")  # classes with `vectors`

MODELS = {
    "DeepseekV2ForCausalLM": "runtime.models.deepseek:DeepSeek",
    "DeepseekV3ForCausalLM": "runtime.models.deepseek:DeepSeek",
    "Gemma2ForCausalLM": "runtime.models.gemma:Gemma",
    "GptOssForCausalLM": "runtime.models.gpt_oss:GptOss",
    "LlamaForCausalLM": "runtime.models.llama:Llama",
    "MistralForCausalLM": "runtime.models.llama:Llama",
    "Qwen2ForCausalLM": "runtime.models.llama:Llama",
    "Qwen2MoeForCausalLM": "runtime.models.llama:Llama",
    "Qwen3ForCausalLM": "runtime.models.llama:Llama",
    "Qwen3MoeForCausalLM": "runtime.models.llama:Llama",
    **{
        family + top: "runtime.models.llama:Llama"
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for top in POOLED
    },
    **{
        family + top: "runtime.models.bert:Bert"
        for family in ("Bert", "Roberta", "XLMRoberta", "DistilBert")
        for top in (*POOLED, "ForMaskedLM")
    },
}


def check_architecture(name: str) -> None:
    """Raises ModelError, listing what is served, for an architecture that is not."""
    if name not in MODELS:
        raise ModelError(
            f"config.json names the architecture {name}, which is not supported; supported are {', '.join(sorted(MODELS))}"
        )


def check_pools(name: str) -> None:
    """Raises ModelError for an architecture whose class makes no vectors."""
    if MODELS[name] not in POOLS:
        able = sorted(
            model for model, index in MODELS.items() if index in POOLS and model.endswith("ForCausalLM")
        )
        raise ModelError(
            f"{name} cannot make embeddings here (--is-embedding); of the models that generate, these can: {', '.join(able)}"
        )


def model_class(name: str) -> "type[Model]":
    """The class of an architecture. Imports torch, so ranks only. Raises ModelError like
    `check_architecture`."""
    check_architecture(name)
    module, _, attribute = MODELS[name].partition(":")
    return getattr(import_module(module), attribute)
