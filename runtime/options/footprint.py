"""How much memory a plan takes on each rank, from config.json and the headers of the safetensors files alone:
nothing is loaded.

Weights, adapters' seats and pages are what the ranks will report, for the layers of runtime/layers split as
they split themselves, and within a per cent where layers lie in host memory. Activations are an upper
estimate of the largest step, and graphs one of the largest captured step: all of them share its memory. What
a driver keeps of each graph is not known here.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from runtime.cache.pool_sizes import Pools, Room, has_two_pools, least_pages, share
from runtime.errors import ModelError
from runtime.messages.memory import OffloadSpec, chosen
from runtime.models.config import ModelConfig
from runtime.models.encoder_config import Encoder
from runtime.models.lora_targets import linears
from runtime.models.mla_config import EXPANDED
from runtime.options.facts import MachineFacts
from runtime.options.plan import Plan

if TYPE_CHECKING:  # it imports numpy, which `runtime check --help` need not wait for
    from runtime.messages.lora import AdapterSetup

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {"bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}  # else that of the activations
STORED = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Stored(Struct, frozen=True):
    """What the weight files hold."""

    files: int
    tensors: int
    num_bytes: int
    dtype: str  # of most bytes, as safetensors spells it


class Footprint(Struct, frozen=True, kw_only=True):
    """Bytes of one rank."""

    weights_bytes: int
    pages_bytes: int
    activations_bytes: int
    graphs_bytes: int
    adapters_bytes: int = 0  # of their seats
    # of weights that lie in host memory, always, or (has_backup) while the device's is given back
    host_bytes: int = 0
    num_pages: int  # the padding page among them
    token_bytes: int  # keys and values of one token
    num_window_pages: int = 0  # of sliding-window layers, where they have their own, with a padding page
    pool_tokens: int
    longest_tokens: int  # of one sequence, by context length and pool
    budget_bytes: int  # of the memory that weights and pages may take
    bound: str  # what the number of pages is bounded by

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.pages_bytes
            + self.activations_bytes
            + self.graphs_bytes
            + self.adapters_bytes
        )

    @property
    def returned_bytes(self) -> int:
        """What can be given back (--enable-memory-saver)."""
        return self.weights_bytes + self.pages_bytes + self.graphs_bytes


def stored_weights(folder: Path) -> Stored:
    """Reads the headers of a folder's safetensors files (eight bytes of length, then JSON). Raises ModelError
    for a broken one."""
    by_dtype: dict[str, int] = {}
    files = sorted(folder.glob("*.safetensors"))
    tensors = 0
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                by_dtype[entry["dtype"]] = by_dtype.get(entry["dtype"], 0) + end - begin
                tensors += 1
    return Stored(
        len(files),
        tensors,
        sum(by_dtype.values()),
        max(by_dtype, key=lambda name: by_dtype[name], default=""),
    )


def _header(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if length <= min(file.stat().st_size, 2**27) else b""
    try:
        return dict(json.loads(raw))
    except ValueError:
        raise ModelError(f"{file.name} is no safetensors file, or it is cut off; download it again") from None


def footprint(
    plan: Plan, model: ModelConfig, machine: MachineFacts, stored: Stored, setup: "AdapterSetup | None" = None
) -> Footprint:
    """What one rank of `plan` takes, with these adapters. All ranks take the same, but for a few rows of the
    vocabulary. Raises StartError where the wished part of the weights cannot lie in host memory."""
    dtype = plan.precision.dtype if plan.precision.dtype != "auto" else STORED.get(stored.dtype, "float32")
    item = DTYPE_BYTES[dtype]
    sizes = (
        plan.parallel.tensor_parallel_size,
        plan.experts.expert_parallel_size,
        1 if plan.experts.uses_all_to_all else plan.parallel.tensor_parallel_size,
    )
    weights = weight_count(model, *sizes) * item + float_bytes(model) - saved_bytes(model, *sizes, item)
    adapters = 0 if setup is None else adapter_count(model, setup, plan.parallel.tensor_parallel_size) * item
    hosted, buffers = offloaded_bytes(plan.memory.offload, model, sizes, item)
    whole, weights = weights, weights - hosted + buffers
    layer_bytes = cached_count(model, plan.parallel.tensor_parallel_size) * KV_BYTES.get(
        plan.precision.kv_cache_dtype, item
    )
    num_full = sum(window == 0 for window in model.windows)
    full_bytes, window_bytes = num_full * layer_bytes, (model.num_layers - num_full) * layer_bytes
    budget = int(machine.memory_bytes // plan.parallel.tensor_parallel_size * plan.memory.mem_fraction_static)
    pools, bound = _pages(
        plan,
        model,
        budget - weights - adapters,
        (full_bytes * plan.memory.page_size, window_bytes * plan.memory.page_size),
    )
    pool = pools.full * plan.memory.page_size
    room = (pools.full + 1, pools.window + 1 if pools.window else pools.full + 1)
    return Footprint(
        weights_bytes=weights,
        pages_bytes=(room[0] * full_bytes + room[1] * window_bytes) * plan.memory.page_size,
        graphs_bytes=_graphs(plan, model, item),
        adapters_bytes=adapters,
        host_bytes=whole if plan.weights.enable_weights_cpu_backup else hosted,
        activations_bytes=_activations(
            plan, model, item, plan.schedule.max_step_tokens, plan.schedule.max_running_requests
        ),
        num_pages=room[0],
        token_bytes=full_bytes + window_bytes,
        num_window_pages=room[1] if pools.window else 0,
        pool_tokens=pool,
        longest_tokens=min(pool, plan.model.context_length),
        budget_bytes=budget,
        bound=bound,
    )


def kv_heads(model: ModelConfig, ranks: int) -> int:
    """Key/value heads of one rank: a share of them, or one where ranks outnumber them."""
    return max(1, model.num_kv_heads // ranks)


def cached_count(model: ModelConfig, ranks: int) -> int:
    """Numbers that a layer keeps of a token: keys and values of one rank's heads, or the latent and the
    rotary part of them all."""
    if model.encoder is not None:
        return 0
    if model.latent is not None:
        return model.latent.kv_rank + model.latent.rope_dim
    return 2 * kv_heads(model, ranks) * model.head_dim


def weight_count(
    model: ModelConfig, ranks: int, expert_ranks: int = 1, shared_ranks: int | None = None
) -> int:
    """Numbers that one rank holds in the model's dtype; over `shared_ranks` a shared expert is split, None:
    over all."""
    if model.encoder is not None:
        return encoder_count(model, model.encoder, ranks)
    hidden = model.hidden_size
    vocabulary = (
        -(-model.vocab_size // ranks) * hidden * (1 if model.is_tied or model.pooling is not None else 2)
    )
    vocabulary += (
        model.pooling.size * hidden if model.pooling is not None and model.pooling.task == "classify" else 0
    )
    layers = sum(
        layer_count(model, i, ranks, expert_ranks, shared_ranks or ranks) for i in range(model.num_layers)
    )
    return layers + hidden + vocabulary


def adapter_count(model: ModelConfig, setup: "AdapterSetup", ranks: int) -> int:
    """Numbers of the seats of one rank, each as large as the largest adapter."""
    count, keys = 0, kv_heads(model, ranks) * model.head_dim
    for name, (ins, outs) in linears(model).items():
        module = name.rpartition(".")[2]
        if module in setup.targets:
            is_row = module in ("o_proj", "down_proj")
            count += (ins // ranks if is_row else ins) + (
                outs if is_row else keys if module in ("k_proj", "v_proj") else outs // ranks
            )
    return count * setup.max_rank * setup.num_lora_slots


def offloaded_bytes(
    wish: OffloadSpec | None, model: ModelConfig, sizes: tuple[int, int, int], item: int
) -> tuple[int, int]:
    """Of weights that lie in host memory, and of the room on the device that their layers share; `sizes` as
    weight_count has them."""
    if wish is None:
        return 0, 0
    full = weight_count(model, *sizes) * item
    part = 1.0 if not full else 1 - saved_bytes(model, *sizes, item) / full
    layers = [int(layer_count(model, i, *sizes) * item * part) for i in range(model.num_layers)]
    kept = [layers[i] for i in chosen(wish, layers)]
    return sum(kept), max(kept) * (wish.ahead + 1)


def layer_count(model: ModelConfig, layer: int, ranks: int, expert_ranks: int, shared_ranks: int) -> int:
    """Numbers that one rank holds of a layer."""
    if model.encoder is not None:
        return encoder_layer_count(model, ranks)
    norms = (4 if model.output_norms else 2) * model.hidden_size
    return (
        attention_count(model, ranks)
        + norms
        + feed_forward_count(model, layer, ranks, expert_ranks, shared_ranks)
    )


def encoder_layer_count(model: ModelConfig, ranks: int) -> int:
    hidden, inner, heads = (
        model.hidden_size,
        model.intermediate_size // ranks,
        model.num_heads // ranks * model.head_dim,
    )
    return (
        3 * (hidden + 1) * heads
        + (heads + 1) * hidden
        + (hidden + 1) * inner
        + (inner + 1) * hidden
        + 4 * hidden
    )


def encoder_count(model: ModelConfig, encoder: Encoder, ranks: int) -> int:
    """Numbers that one rank holds of an encoder: embeddings, layers, and a classifier's head."""
    hidden = model.hidden_size
    embeddings = (-(-model.vocab_size // ranks) + encoder.num_positions + encoder.num_types + 2) * hidden
    is_scoring = model.pooling is not None and model.pooling.task == "classify"
    head = (hidden + 1) * (hidden + model.pooling.size) if model.pooling is not None and is_scoring else 0
    return embeddings + model.num_layers * encoder_layer_count(model, ranks) + head


def attention_count(model: ModelConfig, ranks: int) -> int:
    """Numbers of the first half of a layer."""
    hidden, dim, latent, heads = model.hidden_size, model.head_dim, model.latent, model.num_heads // ranks
    if latent is None:
        q, kv = heads * dim, kv_heads(model, ranks) * dim
        return (
            hidden * (q + 2 * kv)
            + q * hidden
            + (q + 2 * kv) * model.qkv_bias
            + hidden * model.o_bias
            + 2 * dim * model.qk_norm
            + (heads * model.has_sinks)
        )
    queries, rank = heads * (latent.nope_dim + latent.rope_dim), latent.kv_rank
    first = (latent.q_rank or queries) + rank + latent.rope_dim
    q_rank = latent.q_rank or 0
    up = rank + heads * (latent.nope_dim + latent.value_dim) * rank + q_rank + q_rank * queries
    return (
        hidden * first
        + first * model.qkv_bias
        + up
        + heads * latent.value_dim * hidden
        + hidden * model.o_bias
    )


def feed_forward_count(
    model: ModelConfig, layer: int, ranks: int, expert_ranks: int, shared_ranks: int
) -> int:
    """Numbers of the second half of a layer."""
    hidden, inner, moe = model.hidden_size, model.intermediate_size // ranks, model.moe
    if moe is None or not moe.layers[layer]:
        return 3 * hidden * inner + (2 * inner + hidden) * model.mlp_bias
    if moe.is_stacked:
        return moe.num_experts * (3 * hidden * inner + 2 * inner + hidden + hidden + 1)
    experts = moe.num_experts // expert_ranks * moe.intermediate_size // (ranks // expert_ranks)
    return hidden * (
        3 * experts + 3 * moe.shared_size // shared_ranks + moe.num_experts + moe.has_shared_gate
    )


def saved_bytes(model: ModelConfig, ranks: int, expert_ranks: int, shared_ranks: int, item: int) -> int:
    """What a rank's quantised weights take less than in full: within a few per cent, as scales of single
    outputs are not counted."""
    if model.quantization is None:
        return 0
    saved, of = 0.0, model.quantization.of
    for i in range(model.num_layers):
        expert = "experts.0." if model.moe is not None and model.moe.layers[i] else ""
        for name, count in (
            (f"layers.{i}.self_attn.o_proj", attention_count(model, ranks)),
            (
                f"layers.{i}.mlp.{expert}down_proj",
                feed_forward_count(model, i, ranks, expert_ranks, shared_ranks),
            ),
        ):
            if (stored := of(name)) is not None:
                saved += count * (item - stored.scheme.number_bytes)
    return int(saved)


def float_bytes(model: ModelConfig) -> int:
    """Of what stays float32 whatever the dtype: what is added to the scores of experts."""
    moe = model.moe
    return 4 * moe.num_experts * sum(moe.layers) if moe is not None and moe.has_bias else 0


def _pages(plan: Plan, model: ModelConfig, num_bytes: int, page_bytes: tuple[int, int]) -> tuple[Pools, str]:
    """Usable pages, and the option or memory that bounds them. `page_bytes`: of full layers, and of those
    with a window."""
    longest = -(-plan.model.context_length // plan.memory.page_size)
    bounds = [
        (
            plan.schedule.max_running_requests * longest,
            f"{plan.schedule.max_running_requests} sequences of {plan.model.context_length} tokens "
            "(--max-running-requests, --context-length)",
        )
    ]
    if plan.memory.max_total_tokens is not None:
        bounds.append((plan.memory.max_total_tokens // plan.memory.page_size, "--max-total-tokens"))
    most, bound = min(bounds)
    ratio = (
        plan.memory.window_ratio
        if has_two_pools(plan.memory.window_ratio, model.windows, plan.model.context_length)
        else 0.0
    )
    step_tokens = plan.schedule.max_step_tokens + plan.schedule.max_running_requests
    pools = share(
        Room(
            num_bytes=num_bytes,
            full_page_bytes=page_bytes[0],
            window_page_bytes=page_bytes[1],
            most=most,
            longest=longest,
            ratio=ratio,
            least=least_pages(max(model.windows), plan.memory.page_size, step_tokens),
        )
    )
    if pools.full < most:
        bound = f"{plan.memory.mem_fraction_static:g} of the available memory (--mem-fraction-static)"
    return pools, bound


def _graphs(plan: Plan, model: ModelConfig, item: int) -> int:
    """What the largest captured step computes with, decode or not, and what it leaves; the others are within
    it."""
    rows = (
        0
        if plan.graphs.disable_cuda_graph or model.pooling is not None
        else max(plan.graphs.cuda_graph_bs, default=0)
    )
    tokens = max(
        rows,
        max(plan.graphs.piecewise_cuda_graph_tokens, default=0)
        if plan.graphs.enable_piecewise_cuda_graph
        else 0,
    )
    return _activations(plan, model, item, tokens, rows) + tokens * model.hidden_size * item if tokens else 0


def _activations(plan: Plan, model: ModelConfig, item: int, tokens: int, rows: int) -> int:
    """The widest moment of a step: residual, normed input, and what the wider half of a layer makes; then
    float32 logits of the rows."""
    ranks = plan.parallel.tensor_parallel_size
    # of all tokens in one expert
    inner = max(model.intermediate_size, model.moe.intermediate_size if model.moe is not None else 0)
    heads, latent = model.num_heads // ranks, model.latent
    if latent is None:
        attention = 2 * (heads + 2 * kv_heads(model, ranks)) * model.head_dim
    else:  # queries, also as they are brought to the latents, and what they find
        attention = 2 * heads * (latent.kv_rank + latent.rope_dim + latent.nope_dim + latent.value_dim)
    widest = max(3 * inner // ranks, attention)
    # and what it is made from
    made = (
        0 if latent is None else 2 * EXPANDED + plan.model.context_length * (latent.kv_rank + latent.rope_dim)
    )
    return (tokens * (2 * model.hidden_size + widest) + made) * item + rows * model.vocab_size * 4
