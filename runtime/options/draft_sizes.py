"""How much memory a draft model takes on each rank, from its config.json alone."""

from msgspec import Struct

from runtime.models.config.draft_config import DraftConfig, HeadConfig, read_draft_config
from runtime.models.config.model_config import ModelConfig
from runtime.options.model_sizes import (
    attention_layers,
    cached_count,
    float_bytes,
    kv_heads,
    layer_count,
    weight_count,
)
from runtime.options.plan import Plan
from runtime.options.quantized_sizes import Ranks, saved_bytes


class DraftSizes(Struct, frozen=True):
    """What a draft model takes on one rank; nothing where there is none."""

    weights_bytes: int = 0
    token_count: int = 0  # numbers in the keys and values of one token, in all of its layers


def draft_sizes(plan: Plan, target: ModelConfig, ranks: Ranks, item: int) -> DraftSizes:
    """What the draft model takes with `item` bytes a number; nothing where there is none. Raises
    ModelError."""
    speculation = plan.speculation.in_force
    if speculation is None or not speculation.is_own:
        return DraftSizes()
    draft = read_draft_config(speculation, plan.model.model_path, target)
    model = draft.model
    count = sum(_head_count(head, ranks) for head in draft.heads) or weight_count(model, *ranks)
    num_bytes = count * item + float_bytes(model) - _saved(draft, ranks, item)
    num_bytes += sum(8 * head.head_vocab for head in draft.heads)  # numbers of the target's tokens
    return DraftSizes(num_bytes, attention_layers(model) * cached_count(model, ranks[0]))


def _saved(draft: DraftConfig, ranks: Ranks, item: int) -> int:
    return 0 if draft.heads else saved_bytes(draft.model, ranks, item)


def _head_count(head: HeadConfig, ranks: Ranks) -> int:
    """Numbers that one rank holds of a head: its layers, and what joins and ends them."""
    model = head.layers
    hidden = model.hidden_size
    inputs = len(head.aux_layers) * head.target_size if head.aux_layers else 2 * hidden
    count = sum(layer_count(model, i, *ranks) for i in range(model.num_layers)) + (inputs + 1) * hidden
    match head.algorithm:
        case "EAGLE":
            return count - hidden  # the first layer has no first norm
        case "EAGLE3":
            heads = model.num_heads // ranks[0] + 2 * kv_heads(model, ranks[0])
            wide = hidden * heads * model.head_dim
            return count + wide + 2 * hidden + -(-head.head_vocab // ranks[0]) * hidden
        case _:
            return count + (2 + head.has_norm) * hidden
