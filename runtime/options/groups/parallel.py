"""Devices, and how a model is divided among them."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.cores import threads_of_rank
from runtime.devices.facts import DeviceFacts
from runtime.json_value import Fields
from runtime.messages.attention_layout import AttentionLayout
from runtime.messages.balance import BalanceMethod
from runtime.options.declare import (
    Auto,
    Count,
    Derived,
    Group,
    Port,
    Seconds,
    Whole,
    option,
    refused,
    superseded,
)
from runtime.options.facts import MachineFacts

NODE_TIMEOUT_S = 300.0  # without --dist-timeout
STANDBY_SHARE = 1 / 8  # of the free memory, for standby ranks


class Parallel(Group, frozen=True, kw_only=True):
    """Devices and parallelism"""

    device: A[
        Literal["auto", "cpu", "null", "cuda", "npu"],
        option("Device of the ranks; null computes nothing and measures the runtime itself."),
    ] = "auto"
    tensor_parallel_size: A[Count, option("Ranks that share each layer.", aliases=("--tp-size", "--tp"))] = 1
    num_threads: A[
        Count | Auto, option("CPU threads of each rank; auto shares the cores among the ranks.")
    ] = "auto"
    attention_context_parallel_size: A[
        Count,
        option(
            "Ranks that share each prompt in attention, of those of --tensor-parallel-size; the heads are "
            "split over the rest.",
            note="docs/parallelism.md",
            aliases=("--attn-cp-size",),
        ),
    ] = 1
    moe_data_parallel_size: A[
        Count,
        refused(
            "Groups of ranks among which expert layers are replicated.",
            "groups that have all experts share no layer, and are replicas (--data-parallel-size); "
            "--moe-a2a-backend deepep divides tokens, and holds each expert once",
            aliases=("--moe-dp-size",),
        ),
    ] = 1
    pipeline_parallel_size: A[
        Count,
        option(
            "Stages of consecutive layers, each on its own ranks.",
            note="docs/parallelism.md",
            aliases=("--pp-size", "--pp"),
        ),
    ] = 1
    pp_max_micro_batch_size: A[
        Count | None,
        option(
            "Most sequences that decode in one micro-batch; by default they are shared out evenly.",
            aliases=("--max-micro-batch-size",),
        ),
    ] = None
    pp_async_batch_depth: A[Whole, option("Micro-batches in flight beyond one for each stage.")] = 0
    data_parallel_size: A[
        Count,
        option(
            "Replicas of the model behind one address, each with its own ranks and cache.",
            note="docs/parallelism.md",
            aliases=("--dp-size", "--dp"),
        ),
    ] = 1
    load_balance_method: A[
        Literal[
            "auto", "round_robin", "follow_bootstrap_room", "total_requests", "total_tokens", "prefix_aware"
        ],
        option(
            "How requests are spread over replicas: in turn, by requests, by tokens, by cached prompts, "
            "or by their rooms."
        ),
    ] = "auto"
    prefill_round_robin_balance: A[
        bool,
        superseded(
            "Spread requests over prefill replicas in turn.", "replicas are chosen by --load-balance-method."
        ),
    ] = False
    load_watch_interval: A[
        Seconds,
        superseded(
            "Seconds between two looks at the load of replicas.",
            "the schedulers of all replicas share a process and know their load.",
        ),
    ] = 0.1
    enable_dp_attention: A[
        bool,
        option(
            "Divide the ranks into --data-parallel-size groups that have requests of their own and share all "
            "but attention.",
            note="decoders of all families; docs/parallelism.md; over NCCL and HCCL it has not been tried",
        ),
    ] = False
    enable_dp_lm_head: A[
        bool, option("Divide the head over the ranks of each attention group, not over all.")
    ] = False
    enable_attn_tp_input_scattered: A[
        bool,
        option(
            "Give each rank a shard of the tokens between attentions, and so as input of attention.",
            note="docs/parallelism.md",
        ),
    ] = False
    dist_init_addr: A[
        str | None,
        option(
            "Address and port of node 0, where the other nodes reach it.",
            note="docs/parallelism.md",
            aliases=("--nccl-init-addr",),
        ),
    ] = None
    nnodes: A[Count, option("Nodes that share the ranks of all replicas.", note="docs/parallelism.md")] = 1
    node_rank: A[Whole, option("Which of the nodes this is, from 0, which has the HTTP server.")] = 0
    nccl_port: A[
        Port | None,
        superseded(
            "Port on which the ranks of one node meet.",
            "they meet through an inherited file, no port is taken.",
        ),
    ] = None
    dist_timeout: A[
        Count | None,
        option(
            "Seconds that nodes wait for one another, at start and when one is gone, before they end.",
            note="none is 300; of one node it does nothing",
        ),
    ] = None
    dist_secret_file: A[
        str | None,
        option(
            "File with the secret that all nodes share; without it RUNTIME_DIST_SECRET of the environment."
        ),
    ] = None
    standby_ranks: A[
        Whole | Auto,
        option(
            "Sets of rank processes that wait with their libraries imported, to replace ranks that die "
            "sooner; 0: none.",
            note="auto is 1 where all of their memory is a small part of what is free (docs/memory.md); they "
            "take no device memory",
        ),
    ] = "auto"
    base_gpu_id: A[Whole, option("Number of the first accelerator to use.")] = 0
    gpu_id_step: A[Count, option("Distance between the numbers of the accelerators to use.")] = 1
    numa_node: A[
        tuple[Whole, ...] | None,
        option("NUMA node whose cores each rank stays on: one for all ranks, or one for each."),
    ] = None
    custom_sigquit_handler: A[
        str | None,
        superseded(
            "Python function to call when a child process dies.",
            "the server watches its ranks and reports a death itself; library users get an exception.",
        ),
    ] = None
    enable_nccl_nvls: A[
        bool,
        option(
            "Reduce in the switch with NVLink SHARP (NCCL_NVLS_ENABLE=1 for the ranks).",
            devices=("cuda",),
            note="its buffers are memory of each card beside the pages; not tried",
        ),
    ] = False
    enable_symm_mem: A[
        bool,
        option(
            "Reduce tensors of up to 8 MiB in memory that NCCL has registered as symmetric.",
            devices=("cuda",),
            note="proven by a double only",
        ),
    ] = False
    enable_torch_symm_mem: A[
        bool | Auto,
        option(
            "Reduce small tensors through memory that the cards share, by torch.",
            note="auto: with several ranks on one machine, where a check at start finds that the cards can, "
            "and that sums are right",
            devices=("cuda",),
        ),
    ] = "auto"
    enable_mscclpp: A[
        bool,
        refused(
            "Reduce small messages with MSCCL++.",
            "torch does not offer it; --enable-torch-symm-mem and --enable-symm-mem reduce small "
            "tensors in memory that the cards share",
        ),
    ] = False
    disable_custom_all_reduce: A[
        bool,
        superseded(
            "Reduce with the collective library only.",
            "--no-enable-torch-symm-mem leaves all sums to the collective library.",
        ),
    ] = False
    enable_flashinfer_allreduce_fusion: A[
        bool,
        refused(
            "Fuse all-reduce with the norm that follows.",
            "torch does not offer it; --enable-two-batch-overlap computes meanwhile, and "
            "--enable-attn-tp-input-scattered computes norms once",
        ),
    ] = False
    enable_p2p_check: A[
        bool,
        option(
            "Start only where the cards of a replica have access to each other's memory.",
            devices=("cuda",),
            note="proven by a double only",
        ),
    ] = False


class ParallelPlan(Parallel, frozen=True, kw_only=True):
    """Devices and parallelism in force."""

    device: str
    load_balance_method: BalanceMethod
    num_ranks: int  # of one replica
    num_threads: int  # CPU threads of each rank
    standby_ranks: int  # sets of standby ranks
    enable_torch_symm_mem: bool

    @property
    def attention_groups(self) -> int:
        """Groups of ranks with requests of their own; 1: all ranks have the same requests."""
        return self.data_parallel_size if self.enable_dp_attention else 1

    @property
    def num_replicas(self) -> int:
        """Sets of ranks with the whole model."""
        return self.data_parallel_size // self.attention_groups

    @property
    def attention_layout(self) -> AttentionLayout:
        """How attention divides the ranks of a stage."""
        return AttentionLayout(
            self.tensor_parallel_size, self.attention_groups, self.attention_context_parallel_size
        )

    @property
    def micro_batches(self) -> int:
        """Steps of different sequences that keep all stages busy; 1: there is one stage."""
        stages = self.pipeline_parallel_size
        return stages + self.pp_async_batch_depth if stages > 1 else 1

    @property
    def node_timeout_s(self) -> float:
        """Seconds that nodes wait for one another."""
        return float(self.dist_timeout or NODE_TIMEOUT_S)

    @property
    def nodes_of_replica(self) -> int:
        """Nodes that share the ranks of a replica equally; 1 where a node has whole replicas."""
        return max(1, self.nnodes // self.num_replicas)

    @property
    def replicas_on_node(self) -> int:
        """Replicas that have ranks on each node."""
        return max(1, self.num_replicas // self.nnodes)

    def replica_nodes(self, replica: int) -> range:
        """The nodes that have ranks of a replica, in the order of these."""
        first = replica * self.nnodes // self.num_replicas
        return range(first, first + self.nodes_of_replica)

    def node_replicas(self, node: int) -> range:
        """The replicas that have ranks on a node."""
        first = node * self.num_replicas // self.nnodes
        return range(first, first + self.replicas_on_node)

    @property
    def ranks_on_node(self) -> int:
        """Ranks of one replica on each of its nodes."""
        return self.num_ranks // self.nodes_of_replica

    @property
    def nodes_of_stage(self) -> int:
        """Nodes that share the ranks of a stage equally; 1 where a node has stages of its own."""
        return max(1, self.nodes_of_replica // self.pipeline_parallel_size)

    @property
    def processes_on_node(self) -> int:
        """Ranks of all replicas on each node."""
        return self.ranks_on_node * self.replicas_on_node

    def of_ranks(self, replica: int, *, has_group_heads: bool) -> Fields:
        """Fields of StartRank that say how the model is divided, and what a rank of a replica has of its
        machine."""
        return {
            "tp_size": self.tensor_parallel_size,
            "pp_size": self.pipeline_parallel_size,
            "num_nodes": self.nodes_of_replica,
            "num_replicas": self.replicas_on_node,
            "attention_groups": self.attention_groups,
            "has_group_heads": has_group_heads,
            "attention_parts": self.attention_context_parallel_size,
            "num_threads": self.num_threads,
            "numa_nodes": self.numa_nodes(replica),
            "first_device": self._place_on_node(replica) * self.ranks_on_node,
        }

    def numa_nodes(self, replica: int) -> tuple[int, ...]:
        """The nodes of a replica's ranks, or one for all; empty: any."""
        nodes = self.numa_node or ()
        count = self.ranks_on_node
        return nodes[self._place_on_node(replica) * count :][:count] if len(nodes) > count else nodes

    def _place_on_node(self, replica: int) -> int:
        """Which of its node's replicas a replica is, from 0."""
        return replica % self.replicas_on_node


def device(facts: DeviceFacts) -> Derived:
    """The device is the best one of this machine."""
    return Derived(facts.name, "it is the best device that this machine has")


def load_balance_method() -> Derived:
    """Requests go where most of their prompt is cached."""
    return Derived("prefix_aware", "a prompt whose beginning is cached is computed sooner")


def num_ranks(tensor_parallel_size: int, pipeline_parallel_size: int) -> Derived:
    """One process for each tensor-parallel shard of each stage."""
    return Derived(tensor_parallel_size * pipeline_parallel_size, "one process for each part of the model")


def num_threads(machine: MachineFacts, num_ranks: int, nnodes: int, num_replicas: int) -> Derived:
    """The ranks of all replicas on a node share its cores; one stays with the event loop where there are
    enough."""
    ranks = max(1, num_ranks * num_replicas // nnodes)
    threads = threads_of_rank(machine.cores, ranks)
    return Derived(
        threads,
        f"{machine.cores} cores for {ranks} rank{'s' if ranks > 1 else ''}"
        + (", one left to the event loop" if threads * ranks < machine.cores > 2 * ranks else ""),
    )


def standby_ranks(
    device: DeviceFacts, machine: MachineFacts, num_ranks: int, nnodes: int, num_replicas: int
) -> Derived:
    """One set for each replica, where their processes together take at most STANDBY_SHARE of the free
    memory."""
    if nnodes > 1:
        return Derived(0, "with several nodes the ranks of all are started anew")
    needed = device.standby_bytes * num_ranks * num_replicas
    if not needed:
        return Derived(0, f"ranks of {device.name} have next to nothing to import")
    figures = f"{needed >> 20} MiB of {machine.memory_bytes >> 20} MiB that are free"
    if needed > STANDBY_SHARE * machine.memory_bytes:
        return Derived(0, f"a set would take {figures}")
    return Derived(1, f"it makes ranks that die be replaced sooner, for {figures}")


def enable_torch_symm_mem(
    device: DeviceFacts, num_ranks: int, nnodes: int, enable_two_batch_overlap: bool
) -> Derived:
    """Small sums go through shared memory where NVIDIA's cards of one machine add them up."""
    if device.name != "cuda":
        return Derived(False, f"it is of NVIDIA's cards, not of {device.name}")
    if num_ranks == 1:
        return Derived(False, "one rank sums nothing")
    if nnodes > 1:
        return Derived(False, "cards of different machines share no memory")
    if enable_two_batch_overlap:
        return Derived(False, "--enable-two-batch-overlap computes while the collective library sums")
    return Derived(True, "if the cards can, and a check at start finds their sums right")
