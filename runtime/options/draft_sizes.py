"""How much memory drafts take: a draft model on each rank, from its config.json alone, and the texts that
n-grams are looked up in."""

from math import gcd

from msgspec import Struct

from runtime.messages.speculation import Speculation
from runtime.models.config.draft_config import DraftConfig, HeadConfig, read_draft_config
from runtime.models.config.model_config import ModelConfig
from runtime.options.model_sizes import (
    attention_layers,
    cached_count,
    float_bytes,
    kv_heads,
    layer_count,
    query_heads,
    weight_count,
)
from runtime.options.plan import Plan
from runtime.options.quantized_sizes import Ranks, saved_bytes


class DraftSizes(Struct, frozen=True):
    """What a draft model takes on one rank; nothing where there is none."""

    weights_bytes: int = 0
    token_count: int = 0  # numbers in the keys and values of one token, in all of its layers
    # of all slots: tokens and hidden states that wait until the draft model computes them, and states of its
    # recurrent layers
    slots_bytes: int = 0


def draft_sizes(plan: Plan, target: ModelConfig, item: int) -> DraftSizes:
    """What the draft model takes with `item` bytes a number; nothing where there is none. Raises
    ModelError."""
    speculation = plan.speculation.in_force
    if speculation is None or not speculation.is_own:
        return DraftSizes()
    draft = read_draft_config(speculation, target)
    model, ranks = draft.model, _ranks(plan)
    count = sum(_head_count(head, ranks) for head in draft.heads) or weight_count(model, *ranks)
    num_bytes = count * item + float_bytes(model) - _saved(draft, ranks, item)
    num_bytes += sum(8 * head.head_vocab for head in draft.heads)  # numbers of the target's tokens
    token_count = attention_layers(model) * cached_count(model, ranks[0])
    entries = speculation.num_draft_tokens + max(0, len(draft.heads) - 1)
    entry_bytes = 8 + (model.hidden_size * item if draft.heads else 0)
    slots = plan.schedule.max_running_requests + 1
    slot_bytes = entries * entry_bytes
    if model.recurrent is not None and not draft.heads:  # two states: see ranks/drafting/draft_states.py
        wide_item = 4 if plan.states.state_dtype == "float32" else 2
        slot_bytes += 2 * model.recurrent.state_bytes(ranks.of_group, item, wide_item)
    return DraftSizes(num_bytes, token_count, slots * slot_bytes)


def ngram_bytes(speculation: Speculation | None) -> int:
    """Memory of the event loop's process for texts of sequences that have ended, when it is full: tokens, the
    namespaces of their blocks, and for each of two window lengths the places of all tokens."""
    if speculation is None or speculation.is_own:
        return 0
    options = speculation.ngram
    lengths = {min(max(3, options.min_window), options.max_window), options.min_window}
    blocks = max(options.capacity, 4 * (max(lengths) + 64)) // 64
    places = 64 * blocks
    heads = 1 << max(8, places.bit_length() - 3)  # lists of some eight places
    return 4 * places + 8 * blocks + len(lengths) * 4 * (heads + places)


def _ranks(plan: Plan) -> Ranks:
    """Those of the target's attention group, which share all of the draft model."""
    count = plan.parallel.attention_layout.group_size
    dense = 1 if plan.replicates_dense else count
    return Ranks(count, gcd(plan.experts.expert_parallel_size, count), count, count, dense, count, count)


def _saved(draft: DraftConfig, ranks: Ranks, item: int) -> int:
    return 0 if draft.heads else saved_bytes(draft.model, ranks, item)


def _head_count(head: HeadConfig, ranks: Ranks) -> int:
    """Numbers that one rank holds of a head: its layers, and what joins and ends them."""
    model = head.layers
    hidden = model.hidden_size
    inputs = len(head.aux_layers) * head.target_size if head.aux_layers else 2 * hidden
    count = sum(layer_count(model, i, *ranks[:6]) for i in range(model.num_layers)) + (inputs + 1) * hidden
    match head.algorithm:
        case "EAGLE":
            return count - hidden  # the first layer has no first norm
        case "EAGLE3":
            heads = query_heads(model, ranks[0]) + 2 * kv_heads(model, ranks[0])
            wide = hidden * heads * model.head_dim
            return count + wide + 2 * hidden + -(-head.head_vocab // ranks[0]) * hidden
        case _:
            return count + (2 + head.has_norm) * hidden
