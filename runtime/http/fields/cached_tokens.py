"""Where cached tokens came from, as answers report it."""

from collections.abc import Iterable

from runtime.messages.requests import CacheSources


def tiers(cached_tokens: int, loaded: Iterable[CacheSources], storage: str | None) -> dict[str, object]:
    """The fields of SGLang's `cached_tokens_details`. `storage` is the name of the storage backend, if there
    is one."""
    loaded = list(loaded)
    host, fetched = sum(one.host for one in loaded), sum(one.storage for one in loaded)
    details: dict[str, object] = {"device": cached_tokens - host - fetched, "host": host}
    return details if storage is None else details | {"storage": fetched, "storage_backend": storage}
