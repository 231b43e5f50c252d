"""Mixture-of-experts (MoE) models: where experts lie and how tokens reach them."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.devices.facts import DeviceFacts
from runtime.messages.experts import Dispatch
from runtime.options.declare import (
    Count,
    Derived,
    Fraction,
    Group,
    Whole,
    on_device,
    option,
    refused,
    superseded,
)

MoeRunner = Literal[
    "auto",
    "deep_gemm",
    "triton",
    "triton_kernel",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
    "cutlass",
]
MoeExchange = Literal["none", "deepep", "mooncake", "mori", "ascend_fuseep", "flashinfer"]


RecordSize = A[int, Meta(ge=-1)]  # steps; -1: all


class Experts(Group, frozen=True, kw_only=True):
    """Experts"""

    expert_parallel_size: A[
        Count | Literal["tp"],
        option(
            "Groups of the --tensor-parallel-size ranks (tp: all of them) that experts are spread over, and "
            "split within.",
            aliases=("--ep", "--ep-size"),
        ),
    ] = 1
    moe_a2a_backend: A[
        MoeExchange,
        option(
            "Exchange of tokens between the ranks that hold experts; none: all ranks have all tokens, and "
            "one sum joins their parts.",
            later=("mooncake", "mori", "ascend_fuseep", "flashinfer"),
        ),
    ] = "none"
    moe_runner_backend: A[
        MoeRunner,
        option(
            "Kernels of experts: triton on CUDA; auto: the device's own.",
            later=(
                "deep_gemm",
                "triton_kernel",
                "flashinfer_trtllm",
                "flashinfer_cutlass",
                "flashinfer_mxfp4",
                "flashinfer_cutedsl",
                "cutlass",
            ),
            devices=("cuda",),
        ),
    ] = "auto"
    flashinfer_mxfp4_moe_precision: A[
        Literal["default", "bf16"], on_device("cuda", "Type of activations in FlashInfer's mxfp4 experts.")
    ] = "default"
    deepep_mode: A[
        Literal["normal", "low_latency", "auto"],
        option(
            "Whether the host counts tokens that travel (normal), or shapes are fixed (low_latency; auto: "
            "in decode steps)."
        ),
    ] = "auto"
    ep_num_redundant_experts: A[
        Whole,
        option(
            "Copies of experts in each layer, besides one of each.",
            note="see experts.md; on cuda and npu proven by doubles only",
        ),
    ] = 0
    ep_dispatch_algorithm: A[
        Dispatch | None,
        option(
            "How tokens choose among an expert's copies; static is the default (experts.md).",
            note="fake spreads tokens over all experts, for measurements: answers are wrong",
        ),
    ] = None
    init_expert_location: A[
        str,
        option(
            "Where experts lie at start: trivial (in order), or a file with places or counts (experts.md)."
        ),
    ] = "trivial"
    enable_eplb: A[
        bool,
        option(
            "Move experts between ranks while steps run, so that ranks have equal load.",
            note="see experts.md; on cuda and npu proven by doubles only",
        ),
    ] = False
    eplb_algorithm: A[
        str,
        superseded(
            "How placements are found.",
            "nodes and experts decide: DeepSeek's, over nodes or not, and exchanges (experts.md).",
        ),
    ] = "auto"
    eplb_rebalance_num_iterations: A[Count, option("Steps between two looks at the load.")] = 1000
    eplb_rebalance_layers_per_chunk: A[
        Count | None, option("Layers that move between the same two steps; by default all.")
    ] = None
    eplb_min_rebalancing_utilization_threshold: A[
        Fraction,
        option("Nothing moves while the average rank has this part of the busiest one's tokens, or more."),
    ] = 1.0
    expert_distribution_recorder_mode: A[
        Literal["stat", "stat_approx", "per_pass", "per_token"] | None,
        option(
            "Let operators record how tokens spread over experts: counts of each step, layer and expert.",
            later=("per_token",),
            note="stat, stat_approx and per_pass are the same here: exact, step by step; see experts.md",
        ),
    ] = None
    expert_distribution_recorder_buffer_size: A[
        RecordSize,
        option(
            "Steps that the record holds, the latest ones; -1: all.",
            note="4 bytes for each layer and expert, on the device; of -1 in host memory",
        ),
    ] = 1000
    deepep_config: A[str | None, on_device("cuda", "Tuned settings of DeepEP, as JSON.")] = None
    moe_dense_tp_size: A[
        Count | None,
        option(
            "Ranks that share the dense layers of an MoE model: 1, so that each rank has all of them, or all "
            "ranks."
        ),
    ] = None
    elastic_ep_backend: A[
        Literal["none", "mooncake"] | None,
        refused(
            "What goes on without the experts of a rank that failed.",
            "it takes collectives that outlive a lost rank, and those of NCCL, HCCL and gloo do not; all "
            "ranks of the replica start again here, and its requests outlive them",
        ),
    ] = None
    mooncake_ib_device: A[
        str | None, on_device("cuda", "InfiniBand devices of the elastic expert exchange.")
    ] = None
    disable_shared_experts_fusion: A[
        bool,
        superseded(
            "Compute shared experts apart from the routed ones.",
            "they always are, and one exchange between ranks serves both.",
        ),
    ] = False
    disable_flashinfer_cutlass_moe_fp4_allgather: A[
        bool, on_device("cuda", "Quantize to fp4 after the all-gather, not before.")
    ] = False
    kt_weight_path: A[
        str | None, on_device("cuda", "Folder with experts quantized for the CPU side of KTransformers.")
    ] = None
    kt_method: A[str | None, on_device("cuda", "Their format.")] = None
    kt_cpuinfer: A[Count | None, on_device("cuda", "CPU threads that compute experts.")] = None
    kt_threadpool_count: A[Count | None, on_device("cuda", "Thread pools, one a NUMA node.")] = None
    kt_num_gpu_experts: A[
        Count | None, on_device("cuda", "Experts of each layer that stay on the accelerator.")
    ] = None
    kt_max_deferred_experts_per_token: A[
        Count | None, on_device("cuda", "Experts of a token that may be added a layer later.")
    ] = None


class ExpertsPlan(Experts, frozen=True, kw_only=True):
    """Expert parallelism in force."""

    expert_parallel_size: int
    moe_runner_backend: str

    @property
    def uses_all_to_all(self) -> bool:
        """Whether ranks exchange tokens around the experts: then each holds a shard of a step's tokens
        between attention layers, and shared experts whole."""
        return self.moe_a2a_backend != "none"

    @property
    def has_places(self) -> bool:
        """Whether experts have copies, move, or lie in another order than that of their numbers."""
        return (
            self.enable_eplb
            or self.ep_num_redundant_experts > 0
            or self.init_expert_location != "trivial"
            or self.ep_dispatch_algorithm == "fake"
        )


def moe_runner_backend(device: DeviceFacts) -> Derived:
    """Expert kernels: Triton on CUDA, else the device's own."""
    return Derived("triton" if device.name == "cuda" else "own", f"they are the kernels of {device.name}")


def expert_parallel_aliases(moe_a2a_backend: str, tensor_parallel_size: int) -> dict[int | str, Derived]:
    """What words and a default --expert-parallel-size stand for: an all-to-all backend spreads experts over
    all ranks."""
    words: dict[int | str, Derived] = {
        "tp": Derived(tensor_parallel_size, "tp is --tensor-parallel-size: whole experts on every rank")
    }
    if moe_a2a_backend != "none":
        why = f"--moe-a2a-backend {moe_a2a_backend} spreads whole experts over all ranks"
        words[1] = Derived(tensor_parallel_size, why)
    return words
