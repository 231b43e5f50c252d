"""The runtime as one tenant sees it: what it submits is its own, and adapters of others do not exist."""

from msgspec import structs
from starlette.types import Scope

from runtime.http.auth import TENANT
from runtime.json_value import Fields
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.tenants import ANONYMOUS, DEFAULT_TENANT, Tenant
from runtime.service import (
    AdapterControls,
    Controls,
    Health,
    Load,
    MemoryControls,
    ModelCard,
    Service,
    adapters_for,
)


def service_for(service: Service, tenant: Tenant) -> Service:
    """The service for a tenant."""
    return service if tenant == DEFAULT_TENANT else TenantService(service, tenant)


def tenant_in(scope: Scope) -> Tenant:
    """The tenant of a request whose key was checked (http/auth.py)."""
    tenant: Tenant = scope.get(TENANT, ANONYMOUS)
    return tenant


class TenantService:
    """The Service protocol (service.py) for one tenant."""

    __slots__ = ("_service", "tenant")

    def __init__(self, service: Service, tenant: Tenant) -> None:
        self._service = service
        self.tenant = tenant

    @property
    def card(self) -> ModelCard:
        """What the tenant may know of the served model."""
        card = self._service.card
        if not card.adapters or self.tenant.sees_all:
            return card
        return structs.replace(card, adapters=adapters_for(self.tenant, card.adapters))

    @property
    def adapters(self) -> AdapterControls | None:
        """Loading and unloading of adapters; its methods take the tenant."""
        return self._service.adapters

    @property
    def control(self) -> Controls:
        """What operators can do; the methods that concern what tenants own take the tenant."""
        return self._service.control

    @property
    def memory_saver(self) -> MemoryControls:
        """The ranks' memory and weights."""
        return self._service.memory_saver

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request of the tenant. See Service."""
        self._service.submit(structs.replace(request, tenant=self.tenant), sink)

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing after this returns."""
        self._service.abort(request_id)

    def health(self) -> Health:
        """What the runtime can do at this moment."""
        return self._service.health()

    def load(self) -> Load:
        """How busy the runtime is now, with the requests of all tenants."""
        return self._service.load()

    def server_info(self) -> Fields:
        """Version, model, state, options in force and memory of each rank."""
        return self._service.server_info()

    def metrics(self) -> bytes:
        """All metrics in Prometheus text format."""
        return self._service.metrics()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._service.token_bytes(token_id)

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens."""
        return self._service.decode(token_ids, skip_special=skip_special)
