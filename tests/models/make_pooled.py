"""Tiny random checkpoints of models that pool: encoders, and decoders with a score or to embed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.models.make import SIZES as DECODER_SIZES

SPECIALS = ("[PAD]", "[CLS]", "[SEP]")
VOCAB_SIZE = 256 + len(SPECIALS)
PAD, CLS, SEP = 256, 257, 258
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ROBERTA = SIZES | {"pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1}
DISTIL = {
    "vocab_size": VOCAB_SIZE,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bert": (BertConfig, SIZES),
    "roberta": (RobertaConfig, ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, ROBERTA),
    "distilbert": (DistilBertConfig, DISTIL),
    "modernbert": (ModernBertConfig, SIZES | {"local_attention": 8, "num_hidden_layers": 3}),
    "llama": (LlamaConfig, DECODER_SIZES),
    "mistral": (MistralConfig, DECODER_SIZES | {"sliding_window": None}),
    "qwen2": (Qwen2Config, DECODER_SIZES),
    "qwen3": (Qwen3Config, DECODER_SIZES | {"head_dim": 32}),
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert")
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
TOPS = {"embed": AutoModel, "classify": AutoModelForSequenceClassification, "masked": AutoModelForMaskedLM}


def make_pooled(family: str, top: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """`top`: embed, classify, masked."""
    folder = Path(folder)
    kind, sizes = FAMILIES[family]
    make_model(TOPS[top], kind(**(sizes | overrides)), seed).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_reward(architecture: str, size: int, folder: Path) -> Path:
    """A reward model of Qwen 2.5, for which transformers has no class: a body, which is in the folder "body"
    as well, and a head of two layers."""
    body = make_pooled("qwen2", "embed", folder / "body", bos_token_id=256, eos_token_id=258)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(body / "model.safetensors").items()}
    hidden, generator = 64, torch.Generator().manual_seed(1)
    shapes = {
        "0.weight": (hidden, hidden),
        "0.bias": (hidden,),
        "2.weight": (size, hidden),
        "2.bias": (size,),
    }
    for name, shape in shapes.items():
        tensors[f"score.{name}"] = torch.randn(shape, generator=generator) * 0.2
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((body / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def make_model(top: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Weights large enough that biases, norms, positions and segments matter."""
    torch.manual_seed(seed)
    model = top.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if "embed" in name else 0.15)
    return model


def write_tokenizer(folder: Path) -> None:
    """One token a byte; [CLS] text [SEP], or [CLS] text [SEP] second [SEP]."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    )


def write_modules(folder: Path, mode: str, *, normalize: bool = True, **more: Any) -> None:
    """The files that sentence-transformers adds to a model's folder."""
    types = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken", "max": "max_tokens"}
    config = {f"pooling_mode_{name}": key == mode for key, name in names.items()} | more
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
