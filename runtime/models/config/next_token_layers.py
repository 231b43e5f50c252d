"""Next-token layers of checkpoints (multi-token prediction): which families publish them, under which names,
and how they differ. Torch-free.

A next-token layer is a block of the model's own kind behind two norms and a projection, and before a norm:

    x = fc(enorm(embedding of the next token), hnorm(hidden state));  logits = target's head(norm(block(x)))
"""

import re

from msgspec import Struct, structs

from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import LayerKind
from runtime.models.config.registry import LLAMA, MODELS, decoder_family
from runtime.models.config.renames import Renames
from runtime.models.config.tasks import family_of

# classes of models whose next-token layers are blocks as their other layers
BLOCK_CLASSES = (LLAMA, "runtime.models.deepseek:DeepSeek", "runtime.models.deepseek_sparse:SparseDeepSeek")


class NextTokenLayout(Struct, frozen=True, kw_only=True):
    """Names of next-token layers in a family's checkpoints, behind "model.". In them {n} is the number that a
    block has behind the model's layers, {k} the one that it has among the blocks of next-token layers, and
    {last} that of the last block of its next-token layer."""

    block: str
    enorm: str
    hnorm: str
    fc: str
    norm: str = ""  # "": there is none behind the block
    is_hidden_first: bool = False  # the projection takes hidden state and embedding in this order
    has_experts: bool = True  # where the model has any; False: the block is dense
    uncounted: int = 0  # how many there are where config.json does not say
    is_described: bool = False  # blocks are as config.json says (ModelConfig.draft_blocks), never plain ones
    head: str = ""  # of an output of its own behind the norm; "": it has the model's
    carries_normed: bool = True  # the next draft is made of what the norm gives; False: of what is before it
    aliases: tuple[tuple[str, str], ...] = ()  # other names of the same -> those above

    @property
    def is_single(self) -> bool:
        """Whether names tell no second layer from the first."""
        return "{" not in self.fc

    def renames(self, first: int, number: int, num_blocks: int) -> Renames:
        """Names of the next-token layer whose first block is `first` in {n} and `number` in {k} -> those of
        a DraftHead."""

        def name(pattern: str, block: int = 0) -> str:
            return pattern.format(n=first + block, k=number + block, last=number + num_blocks - 1)

        parts = {"enorm.": self.enorm, "hnorm.": self.hnorm, "fc.": self.fc}
        parts |= {"norm.": self.norm} if self.norm else {}
        parts |= {"lm_head.": self.head} if self.head else {}
        return (
            *((name(other), name(theirs)) for other, theirs in self.aliases),
            *((name(theirs), ours) for ours, theirs in parts.items()),
            *((name(self.block, i), f"layers.{i}.") for i in range(num_blocks)),
        )


DEEPSEEK = NextTokenLayout(
    block="layers.{n}.",
    enorm="layers.{n}.enorm.",
    hnorm="layers.{n}.hnorm.",
    fc="layers.{n}.eh_proj.",
    norm="layers.{n}.shared_head.norm.",
)
QWEN3_NEXT = NextTokenLayout(
    block="mtp.layers.{k}.",
    enorm="mtp.pre_fc_norm_embedding.",
    hnorm="mtp.pre_fc_norm_hidden.",
    fc="mtp.fc.",
    norm="mtp.norm.",
    uncounted=1,
)
# the output of each layer is its own; older exports name it head, and those of its makers put it below
# "transformer"
STEP = structs.replace(
    DEEPSEEK,
    head="layers.{n}.shared_head.output.",
    aliases=(
        ("layers.{n}.transformer.", "layers.{n}."),
        ("layers.{n}.shared_head.head.", "layers.{n}.shared_head.output."),
    ),
    has_experts=False,
    is_described=True,
    carries_normed=False,
)
# by family; families of BLOCK_CLASSES that have none here are as DeepSeek V3
LAYOUTS = {
    "Ernie4_5": (
        ERNIE := NextTokenLayout(
            block="mtp_block.{k}.",
            enorm="mtp_emb_norm.{k}.",
            hnorm="mtp_hidden_norm.{k}.",
            fc="mtp_linear_proj.{k}.",
            has_experts=False,
        )
    ),
    "Ernie4_5_Moe": ERNIE,
    "ExaoneMoe": structs.replace(QWEN3_NEXT, has_experts=False),
    "MiMo": NextTokenLayout(
        block="mtp_layers.{k}.",
        enorm="mtp_layers.{k}.token_layernorm.",
        hnorm="mtp_layers.{k}.hidden_layernorm.",
        fc="mtp_layers.{k}.input_proj.",
        norm="mtp_layers.{k}.final_layernorm.",
        is_hidden_first=True,
    ),
    "MiMoV2Flash": NextTokenLayout(
        block="mtp.layers.{k}.",
        enorm="mtp.layers.{k}.enorm.",
        hnorm="mtp.layers.{k}.hnorm.",
        fc="mtp.layers.{k}.eh_proj.",
        norm="mtp.layers.{k}.final_layernorm.",
        has_experts=False,
        uncounted=3,
        is_described=True,
        aliases=(("mtp.layers.{k}.pre_mlp_layernorm.", "mtp.layers.{k}.post_attention_layernorm."),),
    ),
    "NemotronH": NextTokenLayout(
        block="mtp.layers.{k}.",
        enorm="mtp.layers.{k}.enorm.",
        hnorm="mtp.layers.{k}.hnorm.",
        fc="mtp.layers.{k}.eh_proj.",
        norm="mtp.layers.{last}.final_layernorm.",
    ),
    "Qwen3Next": QWEN3_NEXT,
    "Qwen3_5": QWEN3_NEXT,
    "Qwen3_5Moe": QWEN3_NEXT,
    "Step3p5": STEP,
}


def next_token_layout(model: ModelConfig) -> NextTokenLayout | None:
    """How the checkpoints of this model name their next-token layers; None: it has none that are known."""
    family = family_of(model.architecture)
    if family in LAYOUTS:
        return LAYOUTS[family]
    is_known = MODELS.get(model.architecture) in BLOCK_CLASSES
    return DEEPSEEK if is_known and model.recurrent is None else None


def block_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """What the blocks of one next-token layer of this model are."""
    return ("attention",) if model.recurrent is None else model.recurrent.next_token_kinds


def block_config(model: ModelConfig, layout: NextTokenLayout, layers: range) -> ModelConfig:
    """The configuration of the blocks of these next-token layers alone."""
    kinds = block_kinds(model) * len(layers)
    blocks = tuple(model.draft_blocks[i] for i in layers if i < len(model.draft_blocks))
    moe, recurrent = model.moe if layout.has_experts else None, model.recurrent
    if moe is not None:
        has_experts = (
            (True,) * len(kinds)
            if recurrent is None or recurrent.has_feed_forward
            else tuple(kind == "none" for kind in kinds)
        )
        moe = structs.replace(moe, layers=has_experts)
    return structs.replace(
        model,
        num_layers=len(kinds),
        windows=tuple(block.window for block in blocks) or (0,) * len(kinds),
        layer_ropes=tuple(block.rope or model.rope for block in blocks)
        or (model.layer_ropes[:1] * len(kinds) if model.recurrent is not None else ()),
        limits=tuple(block.limit for block in blocks),
        position_scales=(),
        cache_scales=(),
        draft_layers=0,
        draft_blocks=(),
        moe=moe,
        recurrent=None if recurrent is None else structs.replace(recurrent, kinds=kinds),
    )


class LayerNames(Struct, frozen=True):
    """Names of the tensors of one next-token layer."""

    renames: Renames  # names in checkpoints -> those of a DraftHead
    owns: str  # pattern of the names in checkpoints that are this layer's


def names_of(layout: NextTokenLayout, model: ModelConfig, first: int, count: int) -> list[LayerNames]:
    """The names of `count` next-token layers, of which `first` is the number {n} of the first block."""
    size, family = len(block_kinds(model)), decoder_family(model.architecture)
    found = []
    for i in range(count):
        own = layout.renames(first + i * size, i * size, size)
        owns = rf"(^|\.)({'|'.join(re.escape(name) for name, _ in own)})"
        found.append(LayerNames((*own, *family.renames), owns))
    return found


def ignored_names(layout: NextTokenLayout, layers: list[LayerNames]) -> tuple[str, ...]:
    """Patterns of names in checkpoints that are of none of these layers, or of weights that they share with
    the model."""
    owns = "|".join(layer.owns for layer in layers)
    heads = () if layout.head else (r"\.shared_head\.head\.",)
    return rf"^(?!.*({owns}))", r"\.embed_tokens\.", *heads
