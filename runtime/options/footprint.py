"""How much memory a plan takes on each rank, from config.json and the headers of the safetensors files alone:
nothing is loaded.

Weights, LoRA slots and pages are what the ranks will report, for the layers of runtime/layers and their
sharding, and within one per cent where weights are offloaded. Activations are an upper estimate of the
largest step, and graphs one of the largest captured step, whose memory all graphs share. The memory of a
driver for each graph is not counted.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from runtime.cache.pool_sizes import MemoryBudget, Pools, divide_memory, has_two_pools, least_pages
from runtime.messages.stages import Stage
from runtime.models.config.gguf.container import is_gguf, read_gguf
from runtime.models.config.lora_targets import Split
from runtime.models.config.media_config import (
    MediaConfig,
    encoder_bytes,
    kept_bytes,
    slot_bytes,
    with_encoder,
)
from runtime.models.config.mla_config import MAX_EXPANDED
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.shares import most_channels, most_heads
from runtime.models.config.weight_files import read_header, stored_as, weight_files
from runtime.options.draft_sizes import DraftSizes, draft_sizes, ngram_bytes
from runtime.options.facts import MachineFacts
from runtime.options.plan import Plan

if TYPE_CHECKING:  # it imports numpy, which `runtime check --help` need not wait for
    from runtime.messages.lora import AdapterSetup

from runtime.options.model_sizes import (
    adapter_count,
    cached_counts,
    decay_bytes,
    float_bytes,
    kv_heads,
    offloaded_bytes,
)
from runtime.options.quantized_sizes import Ranks, quantization_notice
from runtime.options.stage_sizes import config_of_stage, stage_saved_bytes, stage_weight_count

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {"bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}  # else that of the activations
STORED = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Stored(Struct, frozen=True):
    """What the weight files hold."""

    files: int
    tensors: int
    num_bytes: int
    dtype: str  # of most bytes, as safetensors names it


class Footprint(Struct, frozen=True, kw_only=True):
    """The memory of one rank, in bytes."""

    weights_bytes: int
    pages_bytes: int
    activations_bytes: int
    graphs_bytes: int
    adapters_bytes: int = 0  # of the LoRA slots
    encodings_bytes: int = 0  # of images that were encoded
    # weights in host memory: offloaded ones, or a backup while the device's memory is released
    host_bytes: int = 0
    num_pages: int  # with the padding page
    token_bytes: int  # keys and values of one token
    num_window_pages: int = 0  # of sliding-window layers, where they have their own, with a padding page
    states_bytes: int = 0  # of recurrent layers
    draft_weights_bytes: int = 0  # of weights_bytes, those of a draft model
    draft_token_bytes: int = 0  # of token_bytes, those of a draft model
    ngram_bytes: int = 0  # host memory of a replica's event loop for remembered texts, when it is full
    num_states: int = 0  # with the padding state
    pool_tokens: int
    longest_tokens: int  # of one sequence, by context length and pool
    budget_bytes: int  # memory that weights and pages may take
    bound: str  # the option or memory that bounds the number of pages

    @property
    def total_bytes(self) -> int:
        """Device memory of the rank."""
        return (
            self.weights_bytes
            + self.pages_bytes
            + self.states_bytes
            + self.activations_bytes
            + self.graphs_bytes
            + self.adapters_bytes
            + self.encodings_bytes
        )

    @property
    def releasable_bytes(self) -> int:
        """Bytes that --enable-memory-saver can release."""
        return self.weights_bytes + self.pages_bytes + self.states_bytes + self.graphs_bytes


def stored_weights(folder: Path) -> Stored:
    """Reads the headers of a folder's safetensors files, or of a GGUF file. Raises ModelError for a broken
    one."""
    by_dtype: dict[str, int] = {}
    if is_gguf(folder):
        gguf = read_gguf(folder)
        for stored in gguf.tensors.values():
            by_dtype[stored.type] = by_dtype.get(stored.type, 0) + stored.num_bytes
        return Stored(len(gguf.paths), len(gguf.tensors), sum(by_dtype.values()), _most(by_dtype))
    kind = stored_as(folder)
    has_files = kind == "pt" or any(folder.glob("*.safetensors"))
    files = weight_files(folder) if has_files else []
    if kind == "pt":  # what is in a pickle cannot be seen without unpickling it
        return Stored(len(files), 0, sum(file.stat().st_size for file in files), "pickles")
    tensors = 0
    for file in files:
        for tensor in read_header(file).values():
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.num_bytes
            tensors += 1
    return Stored(len(files), tensors, sum(by_dtype.values()), _most(by_dtype))


def _most(by_dtype: dict[str, int]) -> str:
    return max(by_dtype, key=lambda name: by_dtype[name], default="")


def footprint(
    plan: Plan, model: ModelConfig, machine: MachineFacts, stored: Stored, setup: "AdapterSetup | None" = None
) -> Footprint:
    """The memory of one rank of `plan`, with these adapters. Ranks of a stage differ by a few rows of the
    vocabulary only; of several stages it is the one that takes most, with the number of pages of the one that
    has fewest.

    Raises StartError where the weights that are to be offloaded cannot lie in host memory.
    """
    stages = stage_footprints(plan, model, machine, stored, setup)
    fewest = min(stages, key=lambda rank: rank.num_pages)
    return structs.replace(
        max(stages, key=lambda rank: rank.total_bytes),
        num_pages=fewest.num_pages,
        pool_tokens=fewest.pool_tokens,
        longest_tokens=fewest.longest_tokens,
        bound=fewest.bound,
    )


def stage_footprints(
    plan: Plan, model: ModelConfig, machine: MachineFacts, stored: Stored, setup: "AdapterSetup | None" = None
) -> list[Footprint]:
    """The memory of a rank of each stage, each with the pages that it has room for by itself."""
    count = plan.parallel.pipeline_parallel_size
    speculation = plan.speculation.in_force
    has_heads = speculation is not None and speculation.has_heads
    return [_of_stage(plan, model, machine, stored, setup, Stage(i, count, has_heads)) for i in range(count)]


def _host_bytes(plan: Plan, weights: int, offloaded: int, draft: int) -> int:
    """Bytes of weights in host memory: a backup of all or the offloaded ones, and a draft model's backup."""
    own = weights if plan.weights.enable_weights_cpu_backup else offloaded
    return own + (draft if plan.weights.enable_draft_weights_cpu_backup else 0)


def _of_stage(
    plan: Plan,
    whole: ModelConfig,
    machine: MachineFacts,
    stored: Stored,
    setup: "AdapterSetup | None",
    stage: Stage,
) -> Footprint:
    model = config_of_stage(whole, stage)
    item = DTYPE_BYTES[_dtype(plan, stored.dtype)]
    sizes = _ranks(plan)
    held = with_copies(whole, plan.experts.ep_num_redundant_experts)
    weights = stage_weight_count(held, sizes, stage) * item + float_bytes(model)
    weights += decay_bytes(model, sizes.of_group, item) - stage_saved_bytes(held, sizes, item, stage)
    media = model.media if stage.is_first else None
    weights = with_encoder(plan.encoding, weights, encoder_bytes(media, item))
    adapters = 0 if setup is None else adapter_count(model, setup, _adapter_split(plan, sizes)) * item
    offloaded, buffers = offloaded_bytes(plan.memory.offload, model, sizes[:3], item)
    all_weights, weights = weights, weights - offloaded + buffers
    kv_item = KV_BYTES.get(plan.precision.kv_cache_dtype, item)
    draft = draft_sizes(plan, whole, item) if stage.is_last else DraftSizes()
    weights += draft.weights_bytes
    host = _host_bytes(plan, all_weights, offloaded, draft.weights_bytes)
    full_bytes, window_bytes = (count * kv_item for count in cached_counts(model, sizes.of_heads))
    full_bytes += draft.token_count * kv_item
    state_bytes = drafts = 0
    if model.recurrent is not None:
        state_bytes = model.recurrent.state_bytes(sizes.of_group, item, DTYPE_BYTES[plan.states.state_dtype])
        drafts = model.recurrent.draft_bytes(sizes.of_group, item) * plan.draft_nodes
    own = machine.memory_bytes // plan.parallel.processes_on_node
    budget = int(own * plan.memory.mem_fraction_static)
    pools, bound = _pages(
        plan,
        model,
        budget - weights - adapters - drafts - _encodings(plan, media, item, sizes.of_heads),
        (full_bytes * plan.memory.page_size, window_bytes * plan.memory.page_size),
        state_bytes,
    )
    pool = pools.full * plan.memory.page_size
    room = (pools.full + 1, pools.window + 1 if pools.window else pools.full + 1)
    return Footprint(
        weights_bytes=weights,
        pages_bytes=(room[0] * full_bytes + room[1] * window_bytes) * plan.memory.page_size,
        graphs_bytes=_graphs(plan, model, item),
        adapters_bytes=adapters,
        encodings_bytes=_encodings(plan, media, item, sizes.of_heads),
        host_bytes=host,
        activations_bytes=drafts
        + draft.slots_bytes
        + (
            0
            if stage.is_last
            else plan.steps_in_flight * plan.schedule.max_step_tokens * model.hidden_size * 4
        )
        + _activations(plan, model, item, plan.schedule.max_step_tokens, plan.schedule.max_running_requests),
        num_pages=room[0],
        token_bytes=full_bytes + window_bytes,
        num_window_pages=room[1] if pools.window else 0,
        states_bytes=(pools.states + 1) * state_bytes,
        num_states=pools.states + 1 if state_bytes else 0,
        draft_weights_bytes=draft.weights_bytes,
        draft_token_bytes=draft.token_count * kv_item,
        ngram_bytes=ngram_bytes(plan.speculation.in_force),
        pool_tokens=pool,
        longest_tokens=min(pool, plan.model.context_length),
        budget_bytes=budget,
        bound=bound,
    )


def _encodings(plan: Plan, media: MediaConfig | None, item: int, num_ranks: int) -> int:
    """Bytes of what a rank keeps of encoded media, for all requests and for its slots. `num_ranks`: that
    share the heads."""
    slots = plan.schedule.max_running_requests + 1
    return kept_bytes(media, item) + slots * slot_bytes(media, item, num_ranks)


def with_copies(model: ModelConfig, num_copies: int) -> ModelConfig:
    """A model with as many experts as there are places of them, whose router has a few rows too many."""
    if model.moe is None or not num_copies:
        return model
    moe = structs.replace(model.moe, num_experts=model.moe.num_experts + num_copies)
    return structs.replace(model, moe=moe)


def _dtype(plan: Plan, stored: str) -> str:
    return plan.precision.dtype if plan.precision.dtype != "auto" else STORED.get(stored, "float32")


def _ranks(plan: Plan) -> Ranks:
    layout = plan.parallel.attention_layout
    ranks, groups = layout.num_ranks, layout.group_size
    return Ranks(
        ranks,
        plan.experts.expert_parallel_size,
        1 if plan.experts.uses_all_to_all else ranks,
        layout.num_head_ranks,
        1 if plan.replicates_dense else ranks,
        groups,
        groups if plan.has_group_heads else ranks,
    )


def _adapter_split(plan: Plan, sizes: Ranks) -> Split:
    dense = sizes.mlp or sizes.dense
    return Split(dense, sizes.shared, sizes.of_heads, sizes.of_group, plan.parallel.attention_groups)


def loading_notice(plan: Plan, model: ModelConfig, stored: str = "") -> str | None:
    """One line where weights are quantized or dequantized while they are loaded; None: they are not.
    `stored`: the dtype of most of the checkpoint's bytes."""
    dtype = _dtype(plan, stored)
    return quantization_notice(model, _ranks(plan), dtype, DTYPE_BYTES[dtype])


def _pages(
    plan: Plan, model: ModelConfig, num_bytes: int, page_bytes: tuple[int, int], state_bytes: int
) -> tuple[Pools, str]:
    """Usable pages and states, and the option or memory that bounds the pages. `page_bytes`: bytes of a page
    in all full layers, and in all sliding-window layers; `state_bytes`: of the states of a sequence."""
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
    pools = divide_memory(
        MemoryBudget(
            num_bytes=num_bytes,
            full_page_bytes=page_bytes[0],
            window_page_bytes=page_bytes[1],
            most=most,
            longest=longest,
            ratio=ratio,
            least=least_pages(max(model.windows), plan.memory.page_size, step_tokens),
            state_bytes=state_bytes,
            state_ratio=plan.states.mamba_full_memory_ratio,
            num_states=plan.states.max_mamba_cache_size,
            most_running=plan.schedule.max_running_requests,
        )
    )
    if pools.full < most:
        bound = f"{plan.memory.mem_fraction_static:g} of the available memory (--mem-fraction-static)"
    return pools, bound


def _graphs(plan: Plan, model: ModelConfig, item: int) -> int:
    """Bytes of the largest captured step: its activations and output. Smaller graphs share this memory."""
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
    """Bytes of activations: residual, normed input and the widest tensors of a layer, and float32 logits of
    the rows."""
    ranks = plan.parallel.tensor_parallel_size
    # as if all tokens were in one expert
    inner = max(model.intermediate_size, model.moe.intermediate_size if model.moe is not None else 0)
    sharing = plan.parallel.attention_layout.num_head_ranks
    heads, latent = max(model.num_heads, model.window_heads), model.mla
    heads = most_heads(heads, heads if latent is not None else model.num_kv_heads, sharing)[0]
    if latent is None:
        attention = 2 * (heads + 2 * kv_heads(model, sharing)) * model.head_dim
    else:  # queries, absorbed queries, and attention output
        attention = 2 * heads * (latent.kv_rank + latent.rope_dim + latent.nope_dim + latent.value_dim)
    widest = max(3 * most_channels(inner, ranks), attention)
    # keys and values expanded from latents, and these latents
    made = (
        0
        if latent is None
        else 2 * MAX_EXPANDED + plan.model.context_length * (latent.kv_rank + latent.rope_dim)
    )
    return (tokens * (2 * model.hidden_size + widest) + made) * item + rows * model.vocab_size * 4
