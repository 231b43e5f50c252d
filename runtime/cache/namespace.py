"""Namespaces of the prefix cache: requests share pages only within one.

The keys and values of a prefix depend on its tokens, on the adapter and on the version of the weights.
Tenants and salts keep requests apart that must not learn, from the time to the first token, that another
request had the same prefix. The model itself is no part of the namespace: one runtime serves one model, and
storage tiers put its identity before the namespace.
"""

import msgspec

DEFAULT_VERSION = "default"


def namespace(
    *, adapter: str = "", weight_version: str = "", tenant: str = "", salt: str = "", embeds: str = ""
) -> str:
    """A name that is unique for the combination; "" if all are empty, or the version is the default one.
    `embeds` is a digest of the embeddings of prompts that are given as embeddings."""
    parts = [
        adapter,
        "" if weight_version == DEFAULT_VERSION else weight_version,
        tenant,
        salt,
        *([embeds] if embeds else ()),
    ]
    return msgspec.json.encode(parts).decode() if any(parts) else ""
