"""Names of GGUF's tensors, and how their numbers differ from those of the Hugging Face layout."""

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.container import Gguf, GgufTensor
from runtime.models.config.gguf.families import family_of
from runtime.models.config.gguf.metadata import Metadata
from runtime.models.config.gguf.types import CODED, PLAIN, TABLED

OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# ends of names that are not behind a dot: of a router's correction and of attention sinks
ENDS = {"mlp.gate.e_score_correction": "_bias", "self_attn.sinks": ""}
# all experts of a layer in one tensor
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
READ_APART = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # by config.py
# dimensions, where GGUF lacks the last but one, which is 1
RESHAPED = {"mlp.shared_expert_gate": 2, "mixer.conv": 3}


# "": as they are; "latent": from latents to keys and to values of each head; "stack", "bias": experts of
# gpt-oss, and their biases, gate and up in turn; "codes", "exponents": such experts in MXFP4
Form = Literal["", "latent", "stack", "bias", "codes", "exponents"]


class Source(Struct, frozen=True, kw_only=True):
    """A tensor of the Hugging Face layout, and where a GGUF checkpoint has it."""

    name: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # of the tensor's rows: those of one expert
    heads: int = 0  # of heads so many, rows are in the order of llama.cpp's rotary positions; 0: they are not
    less: int = 0  # taken from each number
    form: Form = ""  # how the numbers of this tensor, and of a second one, become those of the layout
    second: GgufTensor | None = None


def sources(gguf: Gguf) -> Iterator[Source]:
    """All tensors of the checkpoint, with stacks of experts taken apart. Raises ModelError for a tensor or a
    type that is not known here."""
    layout = _Layout(gguf)
    for tensor in gguf.tensors.values():
        stem, _, leaf = tensor.name.rpartition(".")
        block = BLOCK.fullmatch(stem)
        if tensor.name in READ_APART or (block is not None and layout.is_draft(int(block[1]))):
            continue
        check_type(tensor)
        if block is None:
            yield layout.source(tensor, "", layout.outer.get(stem), leaf)
        else:
            yield from layout.of_block(tensor, block[1], block[2], leaf)


class _Layout:
    """How an architecture's tensors become those of the Hugging Face layout."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf, self.family = gguf, family_of(gguf)
        self.arch = str(gguf.metadata.get("general.architecture"))
        meta = Metadata(gguf, self.arch)
        heads = meta.number("attention.head_count") or 0
        kv_heads = meta.number("attention.head_count_kv") or heads
        # heads whose rows are in the order of llama.cpp's rotary positions, by module
        self.turned = {"self_attn.q_proj": int(heads), "self_attn.k_proj": int(kv_heads)}
        self.names, self.outer = LAYER | self.family.names, OUTER | self.family.outer
        drafts = int(meta.number("nextn_predict_layers") or 0)
        self._first_draft = int(meta.needed("block_count")) - drafts if drafts else None

    def is_draft(self, block: int) -> bool:
        """Whether it is one of the last blocks, which make drafts and are not read."""
        return self._first_draft is not None and block >= self._first_draft

    def of_block(self, tensor: GgufTensor, block: str, stem: str, leaf: str) -> Iterator[Source]:
        """What a tensor blk.{block}.{stem}.{leaf} becomes."""
        prefix = f"layers.{block}."
        if (join := JOINED.get((self.family.architecture, stem))) is not None:
            yield from join(self.gguf, f"blk.{block}.", prefix, leaf)
        elif stem in EXPERTS:
            yield from _experts(tensor, f"{prefix}mlp.experts", EXPERTS[stem])
        else:
            yield self.source(tensor, prefix, self.names.get(stem), leaf)

    def source(self, tensor: GgufTensor, prefix: str, module: str | None, leaf: str) -> Source:
        """What a tensor becomes that is one there as well. `module`: None: it is not known."""
        if module is None or leaf not in ("weight", "bias"):
            raise ModelError(
                f"{tensor.name} in {self.gguf.paths[0].name} belongs to nothing that {self.arch} has here; "
                "take the model in Hugging Face layout"
            )
        shape = tensor.shape
        if len(shape) < RESHAPED.get(module, 0):
            shape = (*shape[:-1], 1, shape[-1])
        is_norm = len(shape) == 1 and "norm" in module and leaf == "weight"
        return Source(
            name=f"{prefix}{module}{ENDS.get(module, f'.{leaf}')}",
            tensor=tensor,
            shape=shape,
            heads=self.turned.get(module, 0) if self.family.is_permuted else 0,
            less=self.family.norms_less if is_norm else 0,
        )


def check_type(tensor: GgufTensor) -> None:
    """Raises ModelError for a type whose numbers are not read here."""
    if tensor.type not in PLAIN and tensor.type not in CODED:
        raise ModelError(
            f"{tensor.name} is of type {tensor.type}, which is not read; take a GGUF file of the same model "
            f"in one of {', '.join(CODED)}"
        )
    if tensor.type in TABLED and find_spec("gguf") is None:
        raise ModelError(
            f"{tensor.name} is of type {tensor.type}, whose tables are those of the package gguf: "
            "pip install 'runtime-serve[gguf]'"
        )


def _experts(tensor: GgufTensor, parent: str, module: str) -> Iterator[Source]:
    if len(tensor.shape) != 3:
        raise ModelError(f"{tensor.name} has the shape {list(tensor.shape)}; experts have three dimensions")
    count, rows, columns = tensor.shape
    for expert in range(count):
        yield Source(
            name=f"{parent}.{expert}.{module}.weight",
            tensor=tensor,
            shape=(rows, columns),
            first_row=expert * rows,
        )


def _latents(gguf: Gguf, block: str, prefix: str, _: str) -> Iterator[Source]:
    """kv_b_proj, which newer files have in two tensors."""
    keys, values = (part(gguf, f"{block}attn_{name}_b.weight", 3) for name in "kv")
    heads, rank, nope = keys.shape
    shape = heads * (nope + values.shape[1]), rank
    name = f"{prefix}self_attn.kv_b_proj.weight"
    yield Source(name=name, tensor=keys, second=values, shape=shape, form="latent")


def _nothing(*_: object) -> Iterator[Source]:
    """A tensor that is read with another one."""
    return iter(())


def _stacks(gguf: Gguf, block: str, prefix: str, leaf: str) -> Iterator[Source]:
    """gate_up_proj of gpt-oss, and down_proj, or their biases."""
    names = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    for module, kinds in names.items():
        if leaf == "bias":
            parts = [part(gguf, f"{block}ffn_{kind}_exps.bias", 2) for kind in kinds]
            count, outputs = parts[0].shape
            shapes: dict[Form, tuple[int, ...]] = {"bias": (count, len(kinds) * outputs)}
        else:
            parts = [part(gguf, f"{block}ffn_{kind}_exps.weight", 3) for kind in kinds]
            count, outputs, inputs = parts[0].shape
            outputs *= len(kinds)
            shapes = {"stack": (count, inputs, outputs)}
            if has_mxfp4_experts(gguf):
                groups = inputs // 32
                shapes = {"codes": (count, outputs, groups, 16), "exponents": (count, outputs, groups)}
        second = parts[1] if len(parts) > 1 else None
        for form, shape in shapes.items():
            name = f"{prefix}mlp.experts.{module}{STACK_ENDS[form]}"
            yield Source(name=name, tensor=parts[0], second=second, shape=shape, form=form)


def part(gguf: Gguf, name: str, dimensions: int) -> GgufTensor:
    """A tensor of so many dimensions, whose type is read. Raises ModelError where the file has none."""
    tensor = gguf.tensors.get(name)
    if tensor is None or len(tensor.shape) != dimensions:
        raise ModelError(
            f"{gguf.paths[0].name} has no {name} of {dimensions} dimensions; download the file again"
        )
    check_type(tensor)
    return tensor


def has_mxfp4_experts(gguf: Gguf) -> bool:
    """Whether all experts of a file are in MXFP4."""
    types = {one.type for name, one in gguf.tensors.items() if name.endswith("_exps.weight")}
    return types == {"MXFP4"}


STACK_ENDS: dict[Form, str] = {"stack": "", "bias": "_bias", "codes": "_blocks", "exponents": "_scales"}
# (architecture of config.json, tensor of a layer) -> what is read of it together with others
JOINED: dict[tuple[str, str], Callable[[Gguf, str, str, str], Iterator[Source]]] = {
    ("DeepseekV3ForCausalLM", "attn_k_b"): _latents,
    ("DeepseekV3ForCausalLM", "attn_v_b"): _nothing,
    ("GptOssForCausalLM", "ffn_gate_exps"): _stacks,
    ("GptOssForCausalLM", "ffn_up_exps"): _nothing,
    ("GptOssForCausalLM", "ffn_down_exps"): _nothing,
}
