"""The open requests as operators see them: whose they are, and how far they are. Without texts."""

import time
from collections.abc import Sequence as Series

from runtime.cache.sequence import Sequence
from runtime.scheduling.roster import Roster
from runtime.service import OpenRequest


def describe(
    request_id: str, tenant: str, rosters: Series[Roster], now_s: float | None = None
) -> OpenRequest:
    """An open request of `tenant`; one that no roster has is being tokenised. `now_s`: the monotonic clock's
    time, now by default."""
    now_s = time.monotonic() if now_s is None else now_s
    for roster in rosters:
        if sequences := roster.siblings(request_id):
            return _scheduled(sequences, tenant, now_s)
    return OpenRequest(rid=request_id, tenant=tenant, state="tokenizing")


def _scheduled(sequences: list[Sequence], tenant: str, now_s: float) -> OpenRequest:
    first = sequences[0]
    request = first.request
    return OpenRequest(
        rid=request.id,
        tenant=tenant,
        state="running" if any(sequence.slot >= 0 for sequence in sequences) else "waiting",
        age_s=round(now_s - request.arrival_s, 3),
        prompt_tokens=first.prompt_len,
        cached_tokens=max(first.first_cached_len, 0),
        completion_tokens=sum([sequence.num_generated for sequence in sequences]),
        max_completion_tokens=sum([sequence.max_len - sequence.prompt_len for sequence in sequences]),
    )
