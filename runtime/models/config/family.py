"""How a model family differs from plain Llama, as data. Torch-free; registry.py has the families."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from runtime.json_value import Fields, JsonDict
from runtime.models.config.block import NormKind, Placement, QkNorm
from runtime.models.config.hybrid_config import Hybrid
from runtime.models.config.moe_config import HfMoeConfig, MoeConfig
from runtime.models.config.renames import Renames

LLAMA = "runtime.models.llama:Llama"
DEEPSEEK = "runtime.models.deepseek:DeepSeek"
HYBRID = "runtime.models.hybrid:HybridDecoder"
OF_TRANSFORMERS = "runtime.models.transformers_model:TransformersModel"
MEDIA_CLASSES = (
    LLAMA,
    DEEPSEEK,
    HYBRID,
    OF_TRANSFORMERS,
)  # that take an encoder's rows in place of embeddings

# Which layers have a sliding window:
#   none            no layer
#   all             every layer
#   all_if_enabled  every layer, where use_sliding_window is true
#   by_layer_types  where use_sliding_window is true, layers that layer_types names; without layer_types,
#                   those from max_window_layers on
#   layer_types     as by_layer_types, but layer_types must be there
#   alternating     layers that layer_types names; without layer_types every second layer, from the first on
#   named           layers that layer_types names; without layer_types none
WindowRule = Literal["none", "all", "all_if_enabled", "by_layer_types", "layer_types", "alternating", "named"]


# What lies in a fused tensor, one below the other:
#   halves  gate, up
#   qkv     all query heads, all key heads, all value heads
#   groups  for each key/value head: its query heads, the key head, the value head
#   quarters  in each quarter: query, value and key heads
FusedLayout = Literal["halves", "qkv", "groups", "quarters"]


class Family(Struct, frozen=True, kw_only=True):
    """How a family differs from Llama. Bias flags: None means that config.json decides."""

    model_class: str = LLAMA  # module:class
    renames: Renames = ()
    keys: tuple[tuple[str, str], ...] = ()  # names in config.json -> those of HfConfig
    defaults: Fields = {}  # of config.json, where they are not those of HfConfig
    # from config.json to keys of HfConfig, where it takes more than other names and defaults
    prepare: Callable[[Fields], Fields] | None = None
    fused: dict[str, FusedLayout] = {}  # modules of checkpoints that hold several (models/fused_tensors.py)
    transposed: tuple[str, ...] = ()  # modules of checkpoints whose weights are [inputs, outputs]
    # from config.json to further fields of ModelConfig: what only this family has
    read: Callable[[Fields], Fields] | None = None
    norm: NormKind = "rms"
    placement: Placement = "pre"
    is_pooled: bool = False  # there are architectures of it that embed or classify (POOLED_ARCHITECTURES)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: QkNorm = "none"
    is_rope_interleaved: bool = False  # dimensions 2i and 2i + 1 of a head rotate together
    is_gated: bool = True  # the feed-forward has a gate
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    window: WindowRule = "none"
    moe: Callable[[HfMoeConfig], MoeConfig | None] | None = None  # reads experts; None: all layers are dense
    is_mla: bool = False  # multi-head latent attention
    hybrid: Callable[[JsonDict], Hybrid] | None = None  # reads recurrent layers; None: there are none
    activation: str = "silu"
    has_sinks: bool = False  # attention heads have sinks
    is_tied: bool = False  # the head shares the embedding, where config.json does not say

    @property
    def takes_media(self) -> bool:
        """Whether its models take an encoder's rows in place of embeddings of tokens."""
        return self.model_class in MEDIA_CLASSES
