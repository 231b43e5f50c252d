"""Heads that draft: a layer or a few behind a target model, which guess the token after the next one from the
next token and the target's hidden states.

    EAGLE, EAGLE-2 (Li et al., 2024)   x = fc(embedding, last hidden state); the layer has no first norm, and
                                       what it gives goes to the target's head, and to the next guess
    EAGLE-3 (Li et al., 2025)          state = fc(hidden states of three layers); queries, keys and values are
                                       made from embedding and state together; a head of its own, mostly of a
                                       smaller vocabulary
    next-token layers (DeepSeek-V3)    x = fc(norm(embedding), norm(last hidden state)); behind the layer a
                                       norm, and then the target's head

Embeddings are the target's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.packed import PackedRows, PackedWeight
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.embedding import Head
from runtime.layers.linear import QkvLinear
from runtime.layers.norm import NORMS, NoNorm, Norm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.rotary import Rotary
from runtime.layers.weight import Layer, PackedModules, SourceTensor, Weight, replicated_shard
from runtime.models.base import AttentionLayer, Model, attended
from runtime.models.config.draft_config import HeadConfig
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import model_class
from runtime.models.config.renames import Renames
from runtime.models.hybrid import HybridDecoderLayer
from runtime.models.llama import PLAIN_MODULES, Llama, LlamaDecoderLayer
from runtime.models.loader import is_ignored, target_name
from runtime.models.self_attention import SelfAttention
from runtime.models.torch_files import torch_numbers
from runtime.regular_file import check_regular

TOKEN_MAP = "--speculative-token-map"
INTEGERS = ("I64", "I32")


class WideAttention(SelfAttention):
    """Attention whose queries, keys and values are made from rows of twice the hidden size."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        super().__init__(device, dtype, config, index)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QkvLinear(device, dtype, 2 * config.hidden_size, *sizes, bias=config.qkv_bias)


class Eagle3Layer(LlamaDecoderLayer):
    """The block of an EAGLE-3 head: what is added to is the state."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        super().__init__(device, dtype, config, index, WideAttention)
        self.hidden_norm = NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps)

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """From embeddings and states, [T, hidden] each, to queries and the states."""
        wide = torch.cat((self.input_layernorm.forward(x), self.hidden_norm.forward(residual)), dim=1)
        return self.self_attn.project(wide, cos, sin, batch), residual


class DraftHead(Layer):
    """A head in the form of its algorithm. `target` gives embeddings, and logits where it has no head."""

    def __init__(self, device: Device, dtype: torch.dtype, config: HeadConfig, target: Llama) -> None:
        """`config.layers`: of the head's own layers."""
        own, family = config.layers, model_class(config.layers)
        assert issubclass(family, Llama), "read_draft_config refuses others"
        self.packed_modules: PackedModules = family.packed_modules | ({} if own.is_gated else PLAIN_MODULES)
        self.renames: Renames = config.renames
        self.owns: str = config.owns
        self.ignored_weights: tuple[str, ...] = config.ignored
        self.algorithm: str = config.algorithm
        self.is_hidden_first: bool = config.is_hidden_first
        size, eps = own.hidden_size, own.rms_norm_eps
        self.width: int = size
        self.windows: tuple[int, ...] = own.windows
        self.carries_normed: bool = config.carries_normed
        self.target_size: int = config.target_size
        self.aux_layers: tuple[int, ...] = config.aux_layers
        inputs = len(config.aux_layers) * config.target_size if config.aux_layers else 2 * size
        self.fc = ReplicatedLinear(device, dtype, inputs, size, bias=True)
        assert self.fc.bias is not None
        self.fc.bias.is_optional = True
        self.fc.bias.tensor.zero_()
        is_nextn = config.algorithm == "NEXTN"
        self.enorm, self.hnorm = (
            NORMS[own.norm](device, dtype, size, eps) if is_nextn else None for _ in range(2)
        )
        layer_class = Eagle3Layer if config.algorithm == "EAGLE3" else family.layer_class
        self.layers = [
            layer_class(device, dtype, own, i, family.attention_class) for i in range(own.num_layers)
        ]
        if config.algorithm == "EAGLE" and isinstance(self.layers[0], LlamaDecoderLayer):
            self.layers[0].input_layernorm = NoNorm()
        has_norm = config.has_norm and config.algorithm != "EAGLE"
        self.norm: Norm = NORMS[own.norm](device, dtype, size, eps) if has_norm else NoNorm()
        self.lm_head: Head | None = None
        self.d2t: Weight | None = None  # of each token of the head, the target's number minus its own
        if config.head_vocab:
            self.lm_head = Head(device, dtype, config.head_vocab, size, None)
        if config.head_vocab and config.algorithm == "EAGLE3":
            source = SourceTensor(
                (config.head_vocab,),
                0,
                replicated_shard(config.head_vocab),
                dtypes=INTEGERS,
                dummy_kind="zero",
            )
            offsets = torch.zeros(config.head_vocab, dtype=torch.int64, device=device.torch_device)
            self.d2t = Weight(offsets, {"": source}, is_optional=True)
        self.rotary: Rotary = Rotary(own.rope_of(0), own.head_dim, device.ops, device.torch_device)
        if own.rope_of(0).mrope_section:
            self.rotary.check_sections()
        # set where some tokens of the target are guessed alone: the rows of its head, and what applies them
        self.kept_rows: PackedWeight | None = None
        self._kept_logits: Callable[[Tensor], Tensor] | None = None
        self.attach(target)

    def attach(self, target: Model) -> None:
        """Takes embeddings, the last norm and logits from this target, which may be one that was loaded
        again. It is referred to weakly: its weights are none of the head's, and may be released."""
        assert isinstance(target, Llama), "a target whose hidden states are known"
        assert self.aux_layers == target.stage.aux_layers, "what it is given (with_aux_layers)"
        self._target = ref(target)

    @property
    def target(self) -> Llama:
        """The model that the head continues."""
        target = self._target()
        assert target is not None, "a draft while the target's weights are released"
        return target

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions of its layers, in order."""
        return [layer.self_attn.attention for layer in self.layers if layer.self_attn is not None]

    def checkpoint_key(self, tensor_name: str) -> tuple[str, str]:
        """See NamesTensors: what is the target's fills nothing, whatever its name."""
        if is_ignored(tensor_name, self) or not re.search(self.owns, tensor_name):
            return "", ""
        return target_name(tensor_name, self.packed_modules, self.renames)

    def states_of(self, given: Tensor) -> Tensor:
        """What the target gives of N tokens, [N, hidden] or of several layers [N, layers * hidden] -> their
        states, [N, hidden]."""
        dtype = self.fc.weight.tensor.dtype
        if self.algorithm == "EAGLE3":
            return self.fc.forward(given.to(dtype))
        return self.target.hidden_states(given).to(dtype)

    def forward(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """Hidden states [T, hidden] before the norm, of tokens and the states before them."""
        tables = self.rotary.tables(batch.positions)
        x, residual = self._begin(self.target.embed(batch.token_ids), states)
        for layer in self.layers:
            if isinstance(layer, HybridDecoderLayer):
                x, residual = attended(layer.piecewise(x, residual, tables, batch), batch)
                continue
            queries, residual = layer.before_attention(x, residual, *tables, batch)
            x, residual = layer.after_attention(layer.self_attn.attend(queries, batch), residual, batch)
        return x + residual

    def _begin(self, x: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        states = states.to(x.dtype)
        if self.algorithm == "EAGLE3":
            return x, states
        if self.enorm is not None and self.hnorm is not None:
            x, states = self.enorm.forward(x), self.hnorm.forward(states)
        x = self.fc.forward(torch.cat((states, x) if self.is_hidden_first else (x, states), dim=1))
        return x, torch.zeros_like(x)

    def logits(self, normed: Tensor) -> Tensor:
        """Hidden states [N, hidden] behind the norm -> logits, float32 [N, vocabulary of the head]."""
        if self._kept_logits is not None:
            return self._kept_logits(normed)
        return self.target.head_logits(normed) if self.lm_head is None else self.lm_head.forward(normed)

    def finish(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] before the norm -> logits, float32 [N, vocabulary of the head], and the
        states for the next tokens."""
        normed = self.norm.forward(hidden)
        return self.logits(normed), normed if self.carries_normed else hidden

    def carried(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] before the norm -> the states for the next tokens."""
        return self.norm.forward(hidden) if self.carries_normed else hidden

    def keep_tokens(self, ids: Tensor, head: Head) -> None:
        """Guesses these tokens of the target's alone: int64, rising (FR-Spec, Zhao et al., 2025). `head`: the
        target's. Raises ModelError where its rows cannot be read."""
        packed, ranks = head.packed, head.ranks
        local = ids - -(-head.vocab_size // ranks.size) * ranks.rank
        is_here = (local >= 0) & (local < -(-head.vocab_size // ranks.size))
        local = torch.where(is_here, local, 0)
        if isinstance(packed, PackedRows):
            rows = packed.rows(local)
        elif isinstance(packed, Tensor):
            rows = packed[local]
        else:
            raise ModelError(
                f"{TOKEN_MAP}: rows of the model's head cannot be read on this device; leave it out"
            )
        rows = ranks.all_reduce(rows.to(head.dtype) * is_here.unsqueeze(1))
        ops, kept = head.device.ops, head.device.ops.pack_linear(rows)
        is_exact = isinstance(kept, PackedRows)  # see Head.forward
        self.kept_rows = kept
        self._kept_logits = lambda x: ops.linear(
            x.float() if is_exact else x.to(head.dtype), kept, None
        ).float()


class NextTokenHeads(Layer):
    """Heads in turn behind a target, each of which makes one draft of a chain (DeepSeek-V3, section 2.2).
    What head k computes at a position is made of the token k + 1 places behind it, and of what head k - 1
    gave at the same position."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: tuple[HeadConfig, ...], target: Llama
    ) -> None:
        """Raises ModelError as DraftHead."""
        self.heads = [DraftHead(device, dtype, one, target) for one in config]
        self.packed_modules, self.renames = self.heads[0].packed_modules, self.heads[0].renames
        self.ignored_weights = self.heads[0].ignored_weights
        for index, attention in enumerate(self.attentions):
            attention.index = index

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions of their layers, head by head."""
        return [attention for head in self.heads for attention in head.attentions]

    def checkpoint_key(self, tensor_name: str) -> tuple[str, str]:
        """See NamesTensors."""
        for index, head in enumerate(self.heads):
            name, part = head.checkpoint_key(tensor_name)
            if name:
                return f"heads.{index}.{name}", part
        return "", ""


def read_token_map(path: Path, vocab_size: int) -> list[int]:
    """The tokens of a token map, rising. Raises ModelError."""
    try:
        check_regular(path)
    except OSError as error:
        raise ModelError(f"{TOKEN_MAP} {path} cannot be read: {error.strerror}") from None
    numbers = sorted(set(torch_numbers(path)))
    if numbers[0] < 0 or numbers[-1] >= vocab_size:
        raise ModelError(
            f"{TOKEN_MAP} {path} has tokens from {numbers[0]} to {numbers[-1]}, and the model's vocabulary "
            f"has {vocab_size}; give one that was made for this model"
        )
    return numbers
