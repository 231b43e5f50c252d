"""Experts across ranks by exchanging tokens: each rank has a part of the step's tokens, sends them to their experts, and gets sums back.

    Counted    a token goes once to each rank that has experts of its choice; the ranks first tell one another how many     ("normal")
    Fixed      all tokens go to all ranks: no shape depends on what was chosen, so the host waits for nothing               ("low_latency")

Both are the same to the layers: rows with their choices, and a ticket by which sums find the way back. A row's choices are summed where
it went, so that one row comes back for each that left. Any device with Collectives can use them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.devices.base import Collectives
from runtime.devices.exchange import Exchange, Exchanges, Visitors


@dataclass(frozen=True, slots=True)
class Way:
    """Of one Counted dispatch: which own token each row was that left, rank by rank, and how many rows left and came."""

    tokens: Tensor  # int64 [rows sent]
    sent: list[int]
    came: list[int]
    num_tokens: int


class Counted:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int) -> Visitors:
        size = self.ranks.size
        owners = torch.arange(size, device=x.device).view(size, 1, 1)
        goes = ((ids // num_local).unsqueeze(0) == owners).any(2)  # [ranks, T]
        counts = goes.sum(1)
        came: list[int] = self.ranks.all_to_all(counts).tolist()
        sent: list[int] = counts.tolist()
        tokens = goes.flatten().nonzero().flatten() % max(1, len(x))
        rows = self.ranks.all_to_all(pack(x, ids, weights).index_select(0, tokens), sent, came)
        return visitors(rows, x, ids.shape[1], self.ranks.rank * num_local, Way(tokens, sent, came, len(x)))

    def combine(self, rows: Tensor, ticket: Any) -> Tensor:
        way: Way = ticket
        back = self.ranks.all_to_all(rows, way.came, way.sent)
        out = torch.zeros(way.num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        for tokens, sums in zip(way.tokens.split(way.sent), back.split(way.sent), strict=True):
            # no token is in one of them twice, so the order of additions is settled
            out.index_add_(0, tokens, sums.float())
        return out.to(rows.dtype)


class Fixed:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int) -> Visitors:
        return visitors(self.ranks.all_gather(pack(x, ids, weights), 0), x, ids.shape[1], self.ranks.rank * num_local, None)

    def combine(self, rows: Tensor, ticket: Any) -> Tensor:
        return self.ranks.reduce_scatter(rows)


def pack(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """All that travels of a token in one row of bytes, so that it is one exchange: uint8 [T, hidden * item + 8 * k]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (x, ids.int(), weights.float())], 1)


def visitors(rows: Tensor, x: Tensor, choices: int, first: int, ticket: Any) -> Visitors:
    """Rows of bytes as what they were, of a rank whose experts begin with `first`."""
    sizes = (rows.shape[1] - 8 * choices, 4 * choices, 4 * choices)
    values, ids, weights = (part.contiguous().view(dtype) for part, dtype in zip(
        rows.split(sizes, 1), (x.dtype, torch.int32, torch.float32), strict=True))
    return Visitors(values, ids.long() - first, weights, ticket)


def open_exchanges(backend: str, mode: str, ranks: Collectives) -> Exchanges | None:
    """Those of --moe-a2a-backend and --deepep-mode; None: all ranks have all tokens."""
    if backend == "none" or ranks.size == 1:
        return None
    counted, fixed = Counted(ranks), Fixed(ranks)
    table: dict[str, tuple[Exchange, Exchange]] = {
        "normal": (counted, counted), "low_latency": (fixed, fixed), "auto": (counted, fixed)}
    return Exchanges(*table[mode])
