"""Where cached tokens came from, as answers tell it."""

from collections.abc import Iterable
from typing import Any

from runtime.messages.requests import CacheSources


def tiers(cached_tokens: int, loaded: Iterable[CacheSources], storage: str | None) -> dict[str, Any]:
    """In SGLang's words. `storage`: the backend, where there is one."""
    loaded = list(loaded)
    host, fetched = sum(one.host for one in loaded), sum(one.storage for one in loaded)
    details: dict[str, Any] = {"device": cached_tokens - host - fetched, "host": host}
    return details if storage is None else details | {"storage": fetched, "storage_backend": storage}
