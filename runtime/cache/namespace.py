"""Namespaces of the prefix cache: requests share pages only within one.

The tokens of a prefix decide its keys and values only together with the adapter and the version of the
weights that computed them; and who may know (from the time to the first token) that somebody else sent the
same prefix is a question of tenants and salts. The model itself is no part: one runtime serves one, and tiers
that outlive it put its identity before the namespace.
"""

import msgspec

DEFAULT_VERSION = "default"


def namespace(
    *, adapter: str = "", weight_version: str = "", tenant: str = "", salt: str = "", embeds: str = ""
) -> str:
    """A name that no other combination of these has; "" where all are empty, or the version is the default
    one. `embeds` is a digest of what prompts are embedded as, where that is not what the model says of their
    tokens."""
    parts = [
        adapter,
        "" if weight_version == DEFAULT_VERSION else weight_version,
        tenant,
        salt,
        *([embeds] if embeds else ()),
    ]
    return msgspec.json.encode(parts).decode() if any(parts) else ""
