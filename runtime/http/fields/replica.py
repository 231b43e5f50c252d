"""Which replica a client wants (--data-parallel-size): `data_parallel_rank`; SGLang's `routed_dp_rank`."""

from typing import Annotated as A
from typing import Protocol

from msgspec import Meta

from runtime.errors import InvalidRequest

ReplicaIndex = A[int, Meta(ge=0, le=1 << 20)]


class Routed(Protocol):
    """A body with both fields."""

    data_parallel_rank: int | None
    routed_dp_rank: int | None


def replica_of(body: Routed) -> int | None:
    """The replica that the body names; None: any. Raises InvalidRequest where it names two."""
    first, second = body.data_parallel_rank, body.routed_dp_rank
    if first is not None and second is not None and first != second:
        raise InvalidRequest(
            f"data_parallel_rank {first} and routed_dp_rank {second} name two replicas; give one of them",
            param="data_parallel_rank",
        )
    return second if first is None else first
