"""Which split of a model suits devices of a given number and size, from its config.json alone.

A split is a few flags behind the given options. Each candidate is resolved as a start would resolve it: what
a start refuses is no candidate, and a rank takes what `runtime check memory` says.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.models.config.model_config import ModelConfig
from runtime.options.footprint import Footprint
from runtime.options.plan import Plan

# of the memory for weights and pages, what is left for pages at least: with less, few sequences run at a time
PAGES_SHARE = 1 / 4

# the plan of the given options with these flags behind them, and what a rank takes; raises OptionsError
Try = Callable[[tuple[str, ...]], tuple[Plan, Footprint]]


class Devices(Struct, frozen=True):
    """Devices of a node, and the memory of each in bytes."""

    count: int
    memory_bytes: int


class Split(Struct, frozen=True, kw_only=True):
    """A way to divide a model."""

    tensor: int  # ranks that share each layer
    stages: int
    experts: int  # groups of ranks that experts are spread over
    replicas: int
    context_length: int
    rank: Footprint  # of the rank that takes most
    room: int  # tokens that a replica's cache has room for beside everything else

    @property
    def num_ranks(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.stages

    @property
    def shortfall(self) -> str:
        """What it lacks, "" for nothing."""
        if self.room < self.context_length:
            return f"a context of {self.context_length} tokens would have no room"
        if self.rank.budget_bytes - self.rank.weights_bytes < PAGES_SHARE * self.rank.budget_bytes:
            return f"weights would leave less than {PAGES_SHARE:.0%} of the memory to the cache"
        return ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that stand for it."""
        return _flags(self.tensor, self.stages, self.experts, self.replicas)


class Advice(Struct, frozen=True):
    """The split to take, and why; without one, why there is none."""

    flags: tuple[str, ...] | None
    reason: str

    @property
    def shown(self) -> str:
        """One line: the flags that are not 1, and the reason."""
        if self.flags is None:
            return self.reason
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        words = " ".join(f"{flag} {size}" for flag, size in pairs if size != "1")
        return f"split: {words or 'none, one rank'}: {self.reason}"


class _Search:
    """Tries splits over the devices of some nodes, from few ranks to many."""

    def __init__(self, attempt: Try, devices: Devices, num_nodes: int, has_experts: bool) -> None:
        self.attempt = attempt
        self.devices = devices
        self.num_nodes = num_nodes
        self.has_experts = has_experts
        self.refusals: list[str] = []  # the first one of each shape that is refused
        self.weights_bytes = 0  # of all ranks of the smallest split that was computed

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Tensor-parallel ranks and stages, the preferred ones first: few ranks, and of as many ranks those
        whose layers stay within a node and are divided most. Replicas take the devices that are left."""
        total = self.devices.count * self.num_nodes
        found = [(tensor, ranks // tensor) for ranks in _divisors(total) for tensor in _divisors(ranks)]
        yield from sorted(found, key=lambda one: (one[0] * one[1], one[0] > self.devices.count, -one[0]))

    def computed(self, tensor: int, stages: int) -> Split | None:
        """The split of a shape; None: a start refuses it, with experts spread or not, or it does not fit."""
        replicas = self.devices.count * self.num_nodes // (tensor * stages)
        for experts in (tensor, 1) if self.has_experts and tensor > 1 else (1,):
            try:
                plan, rank = self.attempt(_flags(tensor, stages, experts, replicas))
            except OptionsError as error:
                self.refusals.append(str(error).splitlines()[0])
                continue
            self.weights_bytes = self.weights_bytes or rank.weights_bytes * tensor * stages
            room = room_of(rank, self.devices.memory_bytes)
            if rank.num_pages <= 1 or room <= 0:
                return None
            return Split(
                tensor=tensor,
                stages=stages,
                experts=experts,
                replicas=replicas,
                context_length=plan.model.context_length,
                rank=rank,
                room=room,
            )
        return None

    def chosen(self) -> tuple[Split | None, str]:
        """The first split that lacks nothing, else the one with most room, and why none has fewer ranks."""
        most, why = None, ""
        for tensor, stages in self.shapes():
            split = self.computed(tensor, stages)
            if split is None:
                continue
            if not split.shortfall:
                return split, why
            why = f"with {_ranks(split.num_ranks)} {split.shortfall}"
            if most is None or split.room > most.room:
                most = split
        return most, "" if most is None else most.shortfall


def split_advice(attempt: Try, devices: Devices, plan: Plan, model: ModelConfig) -> Advice:
    """The split of `model` over devices of each node of `plan`, which has the given options alone."""
    search = _Search(attempt, devices, plan.parallel.nnodes, model.moe is not None)
    split, why = search.chosen()
    on = f"{devices.count * plan.parallel.nnodes} devices of {_size(devices.memory_bytes)}"
    if split is None:
        if not search.weights_bytes:
            return Advice(None, f"no split over {on} is possible: {search.refusals[0]}")
        return Advice(
            None,
            f"no split over {on} holds this model, whose weights alone take {_size(search.weights_bytes)}; "
            "take more devices, or quantized weights",
        )
    rank = split.rank
    reasons = [
        f"of {on} each holds {_size(rank.weights_bytes)} of weights, and {_ranks(split.num_ranks)} have room "
        f"for {split.room} tokens",
        why,
        *_remarks(split, plan, model),
    ]
    return Advice(split.flags, "; ".join(filter(None, reasons)))


def _remarks(split: Split, plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Why `split` has the experts, stages and replicas that it has: a sentence for each."""
    if split.experts > 1:
        yield "whole experts on a rank make larger products than slices of each"
    if model.mla is not None and split.tensor > 1:
        yield "latents are not divided, so that more ranks of a replica bring less room than more replicas"
    if split.stages > 1 and plan.parallel.nnodes > 1 and split.stages % plan.parallel.nnodes == 0:
        yield "hidden states alone go from node to node"
    elif split.stages > 1:
        yield "a start refuses to divide its layers further"
    if split.replicas > 1:
        yield f"{split.replicas} replicas share the requests"
    if plan.parallel.device != "cpu" and split.num_ranks * split.replicas > 1:
        yield f"no run on several devices of {plan.parallel.device} has shown it yet"


def _flags(tensor: int, stages: int, experts: int, replicas: int) -> tuple[str, ...]:
    """A split as options. Sizes of 1 are among them, so that they override what is given before them."""
    sizes = {
        "--tensor-parallel-size": tensor,
        "--pipeline-parallel-size": stages,
        "--expert-parallel-size": experts,
        "--data-parallel-size": replicas,
    }
    return tuple(word for flag, size in sizes.items() for word in (flag, str(size)))


def room_of(rank: Footprint, memory_bytes: int) -> int:
    """Tokens that have room: of pages that would not fit beside what a step computes, devices that measure
    this have fewer."""
    excess = max(rank.total_bytes - memory_bytes, 0)
    return rank.pool_tokens - (-(-excess // rank.token_bytes) if rank.token_bytes else excess)


def _divisors(count: int) -> list[int]:
    return [i for i in range(1, count + 1) if count % i == 0]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
