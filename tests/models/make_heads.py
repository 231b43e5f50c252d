"""Tiny random heads that draft behind a target, in the layouts of published checkpoints, and what they draft
by plain torch: without a cache, from the hidden states that transformers gives."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaModel

from tests.models.make import SIZES
from tests.models.make_next_token import DEEPSEEK, NAMES, block_folder, count_blocks, target_config

EPS = 1e-5
HEAD_VOCAB = 120


def _random(shape: tuple[int, ...], is_norm: bool = False) -> Tensor:
    return torch.rand(shape) + 0.5 if is_norm else torch.randn(shape) * 0.15


def _layer(prefix: str, config: LlamaConfig, inputs: int) -> dict[str, Tensor]:
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    found = {f"{prefix}{name}.weight": _random(shape) for name, shape in shapes.items()}
    return found | {f"{prefix}post_attention_layernorm.weight": _random((hidden,), True)}


def make_eagle(folder: Path, *, bias: bool = True, **overrides: Any) -> Path:
    """As yuhuili/EAGLE-*: embedding, fc, and a layer without its first norm; no head."""
    config = _write_config(folder, overrides)
    hidden = config.hidden_size
    tensors = {
        "embed_tokens.weight": _random((config.vocab_size, hidden)),
        "fc.weight": _random((hidden, 2 * hidden)),
        **_layer("layers.0.", config, hidden),
    }
    if bias:
        tensors["fc.bias"] = _random((hidden,))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def make_eagle3(folder: Path, *, has_vocab: bool = True, **overrides: Any) -> Path:
    """As yuhuili/EAGLE3-*: fc over three hidden states, a layer over embedding and state, and a head of fewer
    tokens."""
    vocab = HEAD_VOCAB if has_vocab else SIZES["vocab_size"]
    architectures = ["LlamaForCausalLMEagle3"]
    config = _write_config(folder, {"draft_vocab_size": vocab, "architectures": architectures} | overrides)
    hidden = config.hidden_size
    kept = torch.randperm(config.vocab_size)[:vocab].sort().values
    tensors = {
        "fc.weight": _random((hidden, 3 * hidden)),
        **_layer("midlayer.", config, 2 * hidden),
        "midlayer.hidden_norm.weight": _random((hidden,), True),
        "midlayer.input_layernorm.weight": _random((hidden,), True),
        "norm.weight": _random((hidden,), True),
        "lm_head.weight": _random((vocab, hidden)),
    }
    if has_vocab:
        tensors["d2t"] = kept - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _write_config(folder: Path, overrides: dict[str, Any]) -> LlamaConfig:
    torch.manual_seed(7)
    fields = SIZES | {"num_hidden_layers": 1, "rms_norm_eps": EPS, "architectures": ["LlamaForCausalLM"]}
    config = LlamaConfig(**(fields | overrides))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return config


class HeadReference:
    """Drafts by a head, computed anew for each of them over the whole sequence."""

    def __init__(self, target: Path, head: Path, algorithm: str) -> None:
        self.algorithm = algorithm
        self.known: Tensor | None = None  # the tokens that it guesses; None: all
        self.weights: dict[str, Tensor] = {}
        self.target = AutoModelForCausalLM.from_pretrained(
            target, config=target_config(target), dtype=torch.float32
        ).eval()
        self.layers = self.target.config.num_hidden_layers
        if algorithm == "NEXTN":
            self._open_next_token_layers(target)
            return
        self.config = LlamaConfig.from_pretrained(head)
        if algorithm == "EAGLE":
            self.weights = torch.load(head / "pytorch_model.bin", weights_only=True)
            self.block = LlamaModel(self.config).eval()
            layer = {name: value for name, value in self.weights.items() if name.startswith("layers.")}
            self.block.load_state_dict(layer, strict=False)
            self.block.norm = self.block.layers[0].input_layernorm = nn.Identity()
        else:
            self.weights = load_file(head / "model.safetensors")

    def _open_next_token_layers(self, target: Path) -> None:
        config = target_config(target)
        every = load_file(target / "model.safetensors")
        names = NAMES.get(json.loads((target / "config.json").read_text())["model_type"], DEEPSEEK)
        self.is_hidden_first = "input_proj" in names["fc"]
        self.parts = []
        for k in range(count_blocks(target)):
            numbers = {"n": config.num_hidden_layers + k, "k": k}
            block = AutoModel.from_pretrained(block_folder(target, k), dtype=torch.float32).eval()
            wanted = [one for one in ("enorm", "hnorm", "fc", "output") if one in names]
            parts = {one: every[f"{names[one].format(**numbers)}.weight"] for one in wanted}
            end: nn.Module = nn.Identity()
            if "norm" not in names:
                block.norm = nn.Identity()
            elif "output" in names:  # what goes on is before the norm
                end, block.norm = block.norm, nn.Identity()
            self.parts.append((block, end, parts))

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What follows `tokens`, of which the target has computed all but the last one."""
        given = torch.tensor([tokens[:-1]])
        out = self.target.model(given, output_hidden_states=True)
        if self.algorithm == "EAGLE3":
            given_layers = getattr(self.config, "eagle_config", None)
            wanted = (2, self.layers // 2, self.layers - 3)
            if given_layers is not None:  # numbers of the layers behind which states are taken
                wanted = [index + 1 for index in given_layers["eagle_aux_hidden_state_layer_ids"]]
            wide = torch.cat([out.hidden_states[i][0] for i in wanted], dim=1)
            states = linear(wide, self.weights["fc.weight"])
        else:
            states = out.last_hidden_state[0]
        following = list(tokens[1:])
        if self.algorithm == "NEXTN" and len(self.parts) > 1:
            return self._in_turn(following, states)[:count]
        for _ in range(count):
            embeds = self.target.get_input_embeddings()(torch.tensor(following))
            hidden, logits = getattr(self, f"_{self.algorithm.lower()}")(embeds, states)
            if self.known is not None:
                logits = torch.full_like(logits, -1e9).index_copy(0, self.known, logits[self.known])
            token = int(logits.argmax())
            offsets = self.weights.get("d2t")
            following.append(token if offsets is None else token + int(offsets[token]))
            states = torch.cat((states, hidden[-1:]))
        return following[-count:]

    def _eagle(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        fc = torch.cat((embeds, states), dim=1)
        x = linear(fc, self.weights["fc.weight"], self.weights.get("fc.bias"))
        hidden = self.block(inputs_embeds=x[None]).last_hidden_state[0]
        return hidden, self.target.lm_head(hidden[-1])

    def _nextn(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        block, end, parts = self.parts[0]
        x = self._joined(parts, embeds, states)
        hidden = block(inputs_embeds=x[None]).last_hidden_state[0]
        return hidden, self._logits(end(hidden[-1]), parts)

    def _logits(self, normed: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return linear(normed, parts["output"]) if "output" in parts else self.target.lm_head(normed)

    def _in_turn(self, following: list[int], states: Tensor) -> list[int]:
        """A draft of each next-token layer, which takes the tokens one place further than the one before."""
        drafts: list[int] = []
        for block, end, parts in self.parts:
            shifted = (following + drafts)[len(drafts) :]
            embeds = self.target.get_input_embeddings()(torch.tensor(shifted))
            states = block(inputs_embeds=self._joined(parts, embeds, states)[None]).last_hidden_state[0]
            drafts.append(int(self._logits(end(states[-1]), parts).argmax()))
        return drafts

    def _joined(self, parts: dict[str, Tensor], embeds: Tensor, states: Tensor) -> Tensor:
        config = self.target.config
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        offset = 1.0 if config.model_type.startswith(("qwen3_next", "qwen3_5", "step3")) else 0.0
        both = [_norm(embeds, parts["enorm"] + offset, eps), _norm(states, parts["hnorm"] + offset, eps)]
        return linear(torch.cat(both[::-1] if self.is_hidden_first else both, dim=1), parts["fc"])

    def _eagle3(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        weights, config = self.weights, self.config
        part = {name.removeprefix("midlayer."): value for name, value in weights.items()}
        x = torch.cat(
            (
                _norm(embeds, part["input_layernorm.weight"], EPS),
                _norm(states, part["hidden_norm.weight"], EPS),
            ),
            dim=1,
        )
        q, k, v = (
            linear(x, part[f"self_attn.{name}_proj.weight"])
            .unflatten(1, (-1, config.head_dim))
            .transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotated(q), _rotated(k)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        hidden = states + linear(attended[0].transpose(0, 1).flatten(1), part["self_attn.o_proj.weight"])
        x = _norm(hidden, part["post_attention_layernorm.weight"], EPS)
        gate, up = linear(x, part["mlp.gate_proj.weight"]), linear(x, part["mlp.up_proj.weight"])
        hidden = hidden + linear(silu(gate) * up, part["mlp.down_proj.weight"])
        logits = linear(_norm(hidden[-1:], weights["norm.weight"], EPS), weights["lm_head.weight"])
        return hidden, logits[0]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotated(x: Tensor, theta: float = 10_000.0) -> Tensor:
    dim = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
