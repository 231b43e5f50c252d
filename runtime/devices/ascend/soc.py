"""What differs between Atlas A2 and A3 for the operators that exchange rows of experts. Torch-free.

npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2 use a window in the buffer of their HCCL
group, whose size the group is made with, and refuse a step that does not fit. Sizes and limits are those of
aclnnMoeDistributeDispatchV2 in CANN's documentation; the window of A3 is what its tiling checks.
"""

from collections.abc import Callable, Container
from typing import Literal

from msgspec import Struct

from runtime.models.config.moe_config import MoeConfig

Name = Literal["a2", "a3"]
MIB = 1 << 20
MAX_MB = 1024  # megabytes of a buffer whose size was not asked for
MAX_TOP_K, MAX_EXPERTS = 16, 1024  # experts of a token, experts of a layer


class ExpertLayout(Struct, frozen=True, kw_only=True):
    """How the experts of a layer are spread over ranks."""

    hidden: int
    top_k: int  # experts of a token
    num_experts: int  # of all ranks
    num_ranks: int

    @property
    def num_local(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.num_ranks


def expert_layout(moe: MoeConfig, hidden_size: int, num_ranks: int, num_copies: int = 0) -> ExpertLayout:
    """The layout of a model's experts, each of which one rank has, and of `num_copies` more of some."""
    return ExpertLayout(
        hidden=moe.latent_size or hidden_size,
        top_k=moe.routing.top_k,
        num_experts=moe.num_experts + num_copies,
        num_ranks=num_ranks,
    )


class Soc(Struct, frozen=True, kw_only=True):
    """Limits of one generation. `window`: bytes of the buffer that a step with so many tokens of each rank
    needs."""

    name: Name
    title: str
    prefixes: tuple[str, ...]  # of the name that the driver reports
    max_tokens: int  # of a rank
    hidden_sizes: Container[int]
    num_ranks: Container[int]
    algorithm: str  # comm_alg
    window: Callable[[ExpertLayout, int], int]

    def takes(self, layout: ExpertLayout) -> bool:
        """Whether the operators take layers of these sizes at all."""
        return (
            layout.hidden in self.hidden_sizes
            and layout.num_ranks in self.num_ranks
            and layout.top_k <= MAX_TOP_K
            and layout.num_experts <= MAX_EXPERTS
        )

    def dispatched(self, layout: ExpertLayout, buffer_mb: int) -> int:
        """The most tokens of a rank that a buffer of `buffer_mb` megabytes holds; 0: none, or other sizes
        than the operators take."""
        if not self.takes(layout):
            return 0
        fixed = self.window(layout, 0)
        of_token = self.window(layout, 1) - fixed
        return max(0, min(self.max_tokens, (buffer_mb * MIB - fixed) // of_token))

    def buffer_mb(self, layout: ExpertLayout, num_tokens: int) -> int:
        """Megabytes of the buffer for a step with `num_tokens` tokens of each rank, or for as many as the
        operators take; at most MAX_MB."""
        return min(-(-self.window(layout, min(num_tokens, self.max_tokens)) // MIB), MAX_MB)


def aligned(size: int, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def full_mesh_window(layout: ExpertLayout, num_tokens: int) -> int:
    """Bytes on A2, where every rank writes to every other one."""
    rows = num_tokens * layout.num_ranks * min(layout.num_local, layout.top_k)
    return 2 * (rows * layout.hidden * 2 + 2 * MIB)


def expert_window(layout: ExpertLayout, num_tokens: int) -> int:
    """Bytes on A3: for each local expert the rows of all ranks with 64 bytes beside each, and for each token
    the rows that come back, of its experts and of one shared one, which the operators count always."""
    row = 2 * layout.hidden
    sent = layout.num_local * layout.num_ranks * aligned(aligned(row, 32) + 64, 512)
    returned = (layout.top_k + 1) * aligned(row, 512)
    return 2 * num_tokens * (sent + returned)


SOCS: dict[Name, Soc] = {
    "a2": Soc(
        name="a2",
        title="Atlas A2",
        prefixes=("Ascend910B",),
        max_tokens=256,
        hidden_sizes=range(32, 7169, 32),
        num_ranks=(2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256),
        algorithm="fullmesh",
        window=full_mesh_window,
    ),
    "a3": Soc(
        name="a3",
        title="Atlas A3",
        prefixes=("Ascend910_93",),
        max_tokens=512,
        hidden_sizes=range(1024, 8193),
        num_ranks=range(2, 769),
        algorithm="",
        window=expert_window,
    ),
}


def soc_named(reported: str) -> Soc | None:
    """The generation whose name the driver reports; None: one that is not in the table."""
    return next((soc for soc in SOCS.values() if reported.startswith(soc.prefixes)), None)
