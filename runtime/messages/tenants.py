"""Tenants: who sends a request, and what of all that is kept exists for them.

A tenant is the key that a request came with (http/auth.py). Whatever the server keeps for a client (files,
batches, responses, sessions, adapters) and whatever runs for it has the tenant's name as its owner.
"""

from msgspec import Struct


class Tenant(Struct, frozen=True):
    """Who sends a request. Names are public: metrics show them."""

    name: str = ""  # "": the tenant of those who need no key
    sees_all: bool = True  # there is no other tenant, or this one is the administrator
    quota: float = 1.0  # largest part of each limit on what is kept that this tenant may take

    def sees(self, owner: str) -> bool:
        """Whether something that belongs to `owner` exists for this tenant."""
        return self.sees_all or owner == self.name

    def most(self, limit: int) -> int:
        """How much of a `limit` that all tenants have together this one may take."""
        return limit if self.quota >= 1.0 else max(1, int(limit * self.quota))


DEFAULT_TENANT = Tenant()  # the only tenant of a server with one key or none
ADMINISTRATOR = Tenant("admin")  # the holder of --admin-api-key
ANONYMOUS = Tenant(sees_all=False)  # requests to routes that need no key on any server


def tenant_of(owner: str, quota: float = 1.0) -> Tenant:
    """The tenant whose name is the owner of something, where no key is at hand: to bound what is kept, and
    for what the server itself goes on with. `quota` is that of a tenant that is kept apart."""
    if owner in (DEFAULT_TENANT.name, ADMINISTRATOR.name):
        return Tenant(owner)
    return Tenant(owner, sees_all=False, quota=quota)
