"""Experts across ranks by exchanging tokens: each rank has a part of the step's tokens, sends them to their experts, and gets sums back.

    Counted    a token goes once to each rank that has experts of its choice; the ranks first tell one another how many     ("normal")
    Fixed      all tokens go to all ranks: no shape depends on what was chosen, so the host waits for nothing               ("low_latency")

A row's choices are summed where it went, so that one row comes back for each that left. Any device with Collectives can use them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Collectives, Experts
from runtime.devices.exchange import Exchange, Exchanges


class Counted:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: Any) -> Tensor:
        owners = torch.arange(self.ranks.size, device=x.device).view(-1, 1, 1)
        goes = ((ids // num_local).unsqueeze(0) == owners).any(2)  # [ranks, P]
        counts = goes.sum(1)
        came: list[int] = self.ranks.all_to_all(counts).tolist()
        sent: list[int] = counts.tolist()
        tokens = goes.flatten().nonzero().flatten() % len(x)
        rows = self.ranks.all_to_all(pack(x, ids, weights).index_select(0, tokens), sent, came)
        here, ids, weights = unpack(rows, x.dtype, ids.shape[1])
        sums = self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed) if len(here) else here
        back = self.ranks.all_to_all(sums, came, sent)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for own, part in zip(tokens.split(sent), back.split(sent), strict=True):
            out.index_add_(0, own, part.float())  # no token is in it twice, so the order of additions is settled
        return out.to(x.dtype)


class Fixed:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: Any) -> Tensor:
        here, ids, weights = unpack(self.ranks.all_gather(pack(x, ids, weights), 0), x.dtype, ids.shape[1])
        return self.ranks.reduce_scatter(self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed))


def pack(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """All that travels of a token in one row of bytes, so that it is one exchange: uint8 [P, hidden * item + 8 * k]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (x, ids.int(), weights.float())], 1)


def unpack(rows: Tensor, dtype: torch.dtype, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights."""
    sizes = (rows.shape[1] - 8 * choices, 4 * choices, 4 * choices)
    x, ids, weights = (part.contiguous().view(kind) for part, kind in zip(
        rows.split(sizes, 1), (dtype, torch.int32, torch.float32), strict=True))
    return x, ids.long(), weights


def open_exchanges(backend: str, mode: str, ranks: Collectives, experts: Experts,
                   own: Callable[[Exchange], Exchange] = lambda fixed: fixed) -> Exchanges | None:
    """Those of --moe-a2a-backend and --deepep-mode; None: all ranks have all tokens. `own`: what a device has in place of Fixed."""
    if backend == "none" or ranks.size == 1:
        return None
    counted, fixed = Counted(ranks, experts), own(Fixed(ranks, experts))
    table: dict[str, tuple[Exchange, Exchange]] = {
        "normal": (counted, counted), "low_latency": (fixed, fixed), "auto": (counted, fixed)}
    return Exchanges(*table[mode])
