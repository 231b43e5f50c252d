"""Exchange of tokens between the ranks of experts over a device's collectives. Each rank has a part of the
step's tokens, sends them to the ranks of their experts, and receives sums.

    NormalAllToAll       a token goes once to each rank that has one of its experts; the host waits for counts
    LowLatencyAllToAll   all tokens go to all ranks, so that no shape depends on the routing

The names are those of --deepep-mode. The experts of a rank are summed there, so that one row returns for each
row that was sent.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.all_to_all import AllToAllModes, MoeAllToAll, PackedExperts
from runtime.devices.base import Collectives
from runtime.devices.experts import Experts

TINY = torch.finfo(torch.float32).tiny  # a scale for zeros


class NormalAllToAll:
    """MoeAllToAll that sends each token only where it is needed."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: PackedExperts, is_rounded: bool
    ) -> Tensor:
        """The weighted sums of this rank's tokens, [P, hidden]."""
        owners = torch.arange(self.ranks.size, device=x.device).view(-1, 1, 1)
        goes = ((ids // num_local).unsqueeze(0) == owners).any(2)  # [ranks, P]
        counts = goes.sum(1)
        received: list[int] = self.ranks.all_to_all(counts).tolist()
        sent: list[int] = counts.tolist()
        tokens = goes.flatten().nonzero().flatten() % len(x)
        rows = self.ranks.all_to_all(
            pack(x, ids, weights, is_rounded).index_select(0, tokens), sent, received
        )
        here, ids, weights = unpack(rows, x, ids.shape[1], is_rounded)
        sums = (
            self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed)
            if len(here)
            else here
        )
        back = self.ranks.all_to_all(sums, received, sent)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for own, part in zip(tokens.split(sent), back.split(sent), strict=True):
            # each token occurs at most once, so the order of additions is fixed
            out.index_add_(0, own, part.float())
        return out.to(x.dtype)


class LowLatencyAllToAll:
    """MoeAllToAll with fixed shapes, which graphs can capture."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: PackedExperts, is_rounded: bool
    ) -> Tensor:
        """The weighted sums of this rank's tokens, [P, hidden]."""
        here, ids, weights = unpack(
            self.ranks.all_gather(pack(x, ids, weights, is_rounded), 0), x, ids.shape[1], is_rounded
        )
        return self.ranks.reduce_scatter(
            self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed)
        )


def pack(x: Tensor, ids: Tensor, weights: Tensor, is_rounded: bool) -> Tensor:
    """Everything that is sent of a token as one row of bytes, for one exchange: uint8 [P, ids and weights, x
    or its scale and codes]."""
    values = [x]
    if is_rounded:
        wide = x.float()
        scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_(min=TINY)
        values = [scale, (wide / scale).round_().to(torch.int8)]
    return torch.cat(
        [part.contiguous().view(torch.uint8) for part in (ids.int(), weights.float(), *values)], 1
    )


def unpack(rows: Tensor, like: Tensor, choices: int, is_rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `pack`: x with the dtype of `like`, ids and weights."""
    kinds: list[tuple[torch.dtype, int]] = [(torch.int32, choices), (torch.float32, choices)]
    kinds += (
        [(torch.float32, 1), (torch.int8, like.shape[1])] if is_rounded else [(like.dtype, like.shape[1])]
    )
    parts = rows.split([kind.itemsize * count for kind, count in kinds], 1)
    ids, weights, *values = (
        part.contiguous().view(kind) for part, (kind, _) in zip(parts, kinds, strict=True)
    )
    x = (values[1].float() * values[0]).to(like.dtype) if is_rounded else values[0]
    return x, ids.long(), weights


def open_all_to_all(
    backend: str,
    mode: str,
    ranks: Collectives,
    experts: Experts,
    low_latency: Callable[[MoeAllToAll], MoeAllToAll] = lambda fallback: fallback,
) -> AllToAllModes | None:
    """The exchange of --moe-a2a-backend and --deepep-mode; None: all ranks have all tokens. `low_latency`
    makes the device's own operators, which may fall back on the plain exchange."""
    if backend == "none" or ranks.size == 1:
        return None
    normal = NormalAllToAll(ranks, experts)
    fixed = low_latency(LowLatencyAllToAll(ranks, experts))
    table: dict[str, tuple[MoeAllToAll, MoeAllToAll]] = {
        "normal": (normal, normal),
        "low_latency": (fixed, fixed),
        "auto": (normal, fixed),
    }
    return AllToAllModes(*table[mode])
