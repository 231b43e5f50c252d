"""Rules on ranks and nodes: how a model is divided among them."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, first_of, flag

# (option, its value when off, why several nodes do not have it)
NOT_ON_NODES = (
    ("enable_hierarchical_cache", False, "host memory of one node cannot be relied upon by another"),
    ("standby_ranks", 0, "the ranks of all nodes are started anew"),
    ("enable_torch_symm_mem", False, "cards of different machines share no memory"),
    ("enable_profile_cuda_graph", False, "the folder of traces is one of node 0"),
)


def nodes_divide_ranks(options: Values) -> str | None:
    """All nodes have the same number of ranks: of whole replicas, or of one."""
    ranks, nodes = options["tensor_parallel_size"] * options["pipeline_parallel_size"], options["nnodes"]
    replicas = 1 if options["enable_dp_attention"] else options["data_parallel_size"]
    if replicas % nodes == 0:
        return None
    if nodes % replicas:
        return (
            f"--nnodes {nodes} and --data-parallel-size {replicas}: neither divides the other; a node has "
            "whole replicas, or a replica whole nodes"
        )
    if ranks % (nodes // replicas):
        return (
            f"--nnodes {nodes} does not divide the {ranks * replicas} ranks of --tensor-parallel-size "
            f"times --pipeline-parallel-size{' of all replicas' if replicas > 1 else ''}; "
            "each node takes as many"
        )
    return None


def node_is_one_of_them(options: Values) -> str | None:
    """--node-rank is one of the nodes, and several nodes have an address for their rendezvous."""
    if options["node_rank"] >= options["nnodes"]:
        return (
            f"--node-rank {options['node_rank']} is none of the {options['nnodes']} nodes of --nnodes; "
            "they are numbered from 0"
        )
    if options["nnodes"] > 1 and options["dist_init_addr"] is None:
        return (
            "--nnodes above 1 requires --dist-init-addr, where the nodes meet; give the address of the "
            "first one"
        )
    return None


def nodes_have_what_they_can(options: Values) -> str | None:
    """What several nodes do not have yet, and what does nothing on one."""
    if options["nnodes"] == 1:
        return (
            "--dist-secret-file does nothing without --nnodes above 1; add it, or leave this out"
            if options["dist_secret_file"] is not None
            else None
        )
    for name, off, reason in NOT_ON_NODES:
        if name == "data_parallel_size" and options["enable_dp_attention"]:
            continue  # groups are of the ranks of one model
        if options[name] not in (off, "auto"):
            return f"--nnodes above 1 does not go with {flag(name)}: {reason}; leave one out"
    return None


def attention_replicas_divide_ranks(options: Values) -> str | None:
    """With data-parallel attention the tensor-parallel ranks are divided among attention groups and
    sequence shards."""
    replicas, parts, ranks = (
        options["data_parallel_size"],
        options["attention_context_parallel_size"],
        options["tensor_parallel_size"],
    )
    if not options["enable_dp_attention"]:
        return None
    if replicas == 1:
        return (
            "--enable-dp-attention requires groups of ranks; give --data-parallel-size above 1, or leave it "
            "out"
        )
    if ranks % (replicas * parts):
        return (
            f"--data-parallel-size {replicas} times --attention-context-parallel-size {parts} does not "
            "divide "
            f"--tensor-parallel-size {ranks}; choose sizes that do"
        )
    return None


def transfer_sizes_divide(options: Values) -> str | None:
    """Pages move between prefill and decode ranks whose shares of the heads nest."""
    here, there = options["tensor_parallel_size"], options["disaggregation_decode_tp"]
    if options["disaggregation_mode"] == "prefill" and there is not None and here % there and there % here:
        return (
            f"--disaggregation-decode-tp {there} and --tensor-parallel-size {here} must be multiples of "
            "one another; change one"
        )
    return None


def multiplexing_stands_alone(options: Values) -> str | None:
    """--enable-pdmux goes with neither several ranks of a model nor disaggregation."""
    if not options["enable_pdmux"]:
        return None
    if options["pipeline_parallel_size"] > 1 or options["disaggregation_mode"] != "null":
        return (
            "--enable-pdmux goes with neither --pipeline-parallel-size above 1 nor --disaggregation-mode; "
            "leave one out"
        )
    if options["tensor_parallel_size"] > 1:
        return (
            "--enable-pdmux is for models on one card: collectives of several ranks run one after another, "
            "so neither part would go on without the other; leave it out, or take --tensor-parallel-size 1"
        )
    return None


def heads_reach_ranks(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Each rank computes whole attention heads, one at least."""
    size = plan.parallel.attention_layout.num_head_ranks
    if size > model.num_heads:
        return (
            f"{_sharing_heads(plan)} leaves ranks without any of the model's {model.num_heads} "
            f"attention heads; give at most {model.num_heads}{_other_splits(plan, model.num_heads)}"
        )
    return None


def _other_splits(plan: Plan, num_heads: int) -> str:
    """What divides as many ranks so that each has a head; empty: attention divides them otherwise already."""
    layout = plan.parallel.attention_layout
    if layout.is_divided:
        return ""
    ranks = layout.num_ranks
    parts = next(n for n in range(1, ranks + 1) if ranks % n == 0 and ranks // n <= num_heads)
    return (
        f", or let them share heads: --attention-context-parallel-size {parts}, or --enable-dp-attention "
        f"with --data-parallel-size {parts}"
    )


def _sharing_heads(plan: Plan) -> str:
    """How many ranks share the attention heads, by the options that say so."""
    layout = plan.parallel.attention_layout
    if not layout.is_divided:
        return f"--tensor-parallel-size {layout.num_ranks}"
    divided = [f"--data-parallel-size {layout.num_groups}"] * (layout.num_groups > 1)
    divided += [f"--attention-context-parallel-size {layout.num_parts}"] * (layout.num_parts > 1)
    return (
        f"{layout.num_head_ranks}, which is --tensor-parallel-size {layout.num_ranks} by "
        f"{' and '.join(divided)},"
    )


def inputs_are_scattered_over_ranks(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Shards of tokens between attentions need several ranks, and layers that are not given all tokens."""
    if not plan.parallel.enable_attn_tp_input_scattered:
        return None
    reasons = {
        "does nothing with one rank; raise --tensor-parallel-size, or leave it out": (
            plan.parallel.tensor_parallel_size == 1
        ),
        f"does nothing on --device {device.name}, which computes nothing; leave it out": device.name
        == "null",
        "does nothing with --moe-a2a-backend, which gives each rank a shard by itself; leave it out": (
            plan.experts.uses_all_to_all
        ),
        "does not go with --enable-lora, whose adapters are given all tokens of a step; leave one out": (
            plan.lora.enable_lora
        ),
        "is for models that generate; leave it out": model.pooling is not None,
    }
    if (reason := first_of(reasons)) is None:
        return None
    return f"--enable-attn-tp-input-scattered {reason}"


def two_batches_have_an_exchange(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Two-batch overlap needs several ranks, and steps that can be cut."""
    kernels = plan.kernels
    if not kernels.enable_two_batch_overlap:
        return None
    reasons = {
        "does nothing with one rank; raise --tensor-parallel-size, or leave it out": (
            plan.parallel.tensor_parallel_size == 1
        ),
        f"does nothing on --device {device.name}, which computes nothing; leave it out": device.name
        == "null",
        "is not there for models that see whole texts; leave it out": model.pooling is not None
        and model.pooling.is_whole,
        "needs two plans of attention at a time, and those of flashinfer share their memory; take another "
        "--attention-backend, or leave it out": "flashinfer"
        in (kernels.prefill_attention_backend, kernels.decode_attention_backend),
    }
    if (reason := first_of(reasons)) is None:
        return None
    return f"--enable-two-batch-overlap {reason}"


def parts_of_a_card_share_nothing(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What runs on two parts of a card at the same time uses no memory of the other one."""
    if not plan.disaggregation.enable_pdmux:
        return None
    kernels = plan.kernels
    reasons = {
        "needs --kernel-fusion off or safe: with all, kernels of both parts count in the same memory": (
            kernels.kernel_fusion == "all"
        ),
        "does not go with --enable-decode-work-list, by which kernels of both parts count in the same "
        "memory; leave one out": kernels.enable_decode_work_list,
        "does not go with kernels of flashinfer, which share their memory; take another "
        "--attention-backend, or leave it out": bool(
            {"flashinfer", "trtllm_mha", "trtllm_mla"}
            & {kernels.prefill_attention_backend, kernels.decode_attention_backend}
        ),
        "does not go with counts of experts, to which both parts would add; leave out "
        "--enable-expert-distribution-metrics and --expert-distribution-recorder-mode": (
            plan.expert_steps is not None
        ),
        "is for models that generate; leave it out": model.pooling is not None,
    }
    if (reason := first_of(reasons)) is None:
        return None
    return f"--enable-pdmux {reason}"


def single_batches_have_shared_experts(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Single-batch overlap computes shared experts meanwhile."""
    if not plan.kernels.enable_single_batch_overlap or (model.moe is not None and model.moe.shared_size):
        return None
    return (
        "--enable-single-batch-overlap computes shared experts while tokens travel to the others, and this "
        "model has none; leave it out"
    )


def device_numbers_have_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Device numbers need a device of which a machine has several."""
    given = [flag(name) for name in ("base_gpu_id", "gpu_id_step") if plan.why[name].source != "default"]
    if given and not device.is_numbered:
        return (
            f"{', '.join(given)} chooses among accelerators, and --device {device.name} is none; leave it out"
        )
    return None


def numa_nodes_are_of_ranks(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--numa-node names one node for all ranks, or one for each rank of one replica, or of all."""
    ranks, nodes = plan.parallel.ranks_on_node, plan.parallel.numa_node
    replicas = plan.parallel.replicas_on_node
    if nodes is not None and len(nodes) not in (1, ranks, ranks * replicas):
        of = f" in each of {replicas} replicas on a node" if replicas > 1 else ""
        return (
            f"--numa-node names {len(nodes)} nodes for {ranks} ranks{of}; "
            "give one for all of them, or one for each"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (
    nodes_divide_ranks,
    node_is_one_of_them,
    nodes_have_what_they_can,
    attention_replicas_divide_ranks,
    transfer_sizes_divide,
    multiplexing_stands_alone,
)

PLAN_RULES: tuple[PlanRule, ...] = (
    heads_reach_ranks,
    inputs_are_scattered_over_ranks,
    two_batches_have_an_exchange,
    parts_of_a_card_share_nothing,
    single_batches_have_shared_experts,
    device_numbers_have_devices,
    numa_nodes_are_of_ranks,
)
