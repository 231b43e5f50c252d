"""Experts across ranks by exchanging tokens: each rank has a part of the step's tokens, sends them to their
experts, and gets sums back.

    Counted    a token goes once to each rank that has experts of its choice; the ranks first tell one another how many     ("normal")
    Fixed      all tokens go to all ranks: no shape depends on what was chosen, so the host waits for nothing               ("low_latency")

A row's choices are summed where it went, so that one row comes back for each that left. Any device with
Collectives can use them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.devices.all_to_all import Exchange, Exchanges
from runtime.devices.base import Collectives, Experts

TINY = torch.finfo(torch.float32).tiny  # a scale for zeros


class Counted:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: Any, is_rounded: bool
    ) -> Tensor:
        owners = torch.arange(self.ranks.size, device=x.device).view(-1, 1, 1)
        goes = ((ids // num_local).unsqueeze(0) == owners).any(2)  # [ranks, P]
        counts = goes.sum(1)
        came: list[int] = self.ranks.all_to_all(counts).tolist()
        sent: list[int] = counts.tolist()
        tokens = goes.flatten().nonzero().flatten() % len(x)
        rows = self.ranks.all_to_all(pack(x, ids, weights, is_rounded).index_select(0, tokens), sent, came)
        here, ids, weights = unpack(rows, x, ids.shape[1], is_rounded)
        sums = (
            self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed)
            if len(here)
            else here
        )
        back = self.ranks.all_to_all(sums, came, sent)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for own, part in zip(tokens.split(sent), back.split(sent), strict=True):
            # no token is in it twice, so the order of additions is settled
            out.index_add_(0, own, part.float())
        return out.to(x.dtype)


class Fixed:
    """See above, and Exchange."""

    def __init__(self, ranks: Collectives, experts: Experts) -> None:
        self.ranks = ranks
        self.experts = experts

    def apply(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_local: int, packed: Any, is_rounded: bool
    ) -> Tensor:
        here, ids, weights = unpack(
            self.ranks.all_gather(pack(x, ids, weights, is_rounded), 0), x, ids.shape[1], is_rounded
        )
        return self.ranks.reduce_scatter(
            self.experts.apply(here, ids - self.ranks.rank * num_local, weights, packed)
        )


def pack(x: Tensor, ids: Tensor, weights: Tensor, is_rounded: bool) -> Tensor:
    """All that travels of a token in one row of bytes, so that it is one exchange: uint8 [P, ids and weights,
    x or its scale and codes]."""
    values = [x]
    if is_rounded:
        wide = x.float()
        scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_(min=TINY)
        values = [scale, (wide / scale).round_().to(torch.int8)]
    return torch.cat(
        [part.contiguous().view(torch.uint8) for part in (ids.int(), weights.float(), *values)], 1
    )


def unpack(rows: Tensor, like: Tensor, choices: int, is_rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x with the dtype of `like`, ids and weights."""
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


def open_exchanges(
    backend: str,
    mode: str,
    ranks: Collectives,
    experts: Experts,
    own: Callable[[Exchange], Exchange] = lambda fixed: fixed,
) -> Exchanges | None:
    """Those of --moe-a2a-backend and --deepep-mode; None: all ranks have all tokens. `own`: what a device has
    in place of Fixed."""
    if backend == "none" or ranks.size == 1:
        return None
    counted, fixed = Counted(ranks, experts), own(Fixed(ranks, experts))
    table: dict[str, tuple[Exchange, Exchange]] = {
        "normal": (counted, counted),
        "low_latency": (fixed, fixed),
        "auto": (counted, fixed),
    }
    return Exchanges(*table[mode])
