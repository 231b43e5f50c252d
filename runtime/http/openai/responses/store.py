"""Stored responses, which clients fetch again and continue (stored/records.py)."""

from msgspec import Struct

from runtime.errors import InvalidRequest, NotFound
from runtime.http.openai.responses.items import Item
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.records import MAX_BYTES, MAX_RECORDS, RecordStore
from runtime.messages.tenants import Tenant

INTERRUPTED = {"code": "server_error", "message": "the server was stopped before the answer was complete"}
OPEN = ("queued", "in_progress")


class PreviousResponseNotFound(InvalidRequest):
    """There is no stored response to continue. Clients know the code, and send the conversation whole."""

    code = "previous_response_not_found"


class StoredResponse(Struct, frozen=True):
    """A response and the conversation before it."""

    response: dict[str, object]
    context: list[Item]  # items of earlier responses, without instructions
    input: list[Item]
    owner: str = ""  # name of its tenant; "": of a server without keys, or before responses had owners

    @property
    def id(self) -> str:
        """The response id."""
        return str(self.response["id"])

    @property
    def is_over(self) -> bool:
        """Whether its answer is complete, or will never be."""
        return self.response["status"] not in OPEN

    @property
    def conversation(self) -> list[Item]:
        """The items of the whole conversation, this response included."""
        return [*self.context, *self.input, *self.response["output"]]  # type: ignore[misc]

    def end(self) -> None:
        """Ends a response that was interrupted."""
        if not self.is_over:
            self.response.update(status="failed", error=INTERRUPTED)


class ResponseStore(RecordStore[StoredResponse]):
    """Responses by id."""

    def __init__(
        self,
        disk: Disk | None,
        max_responses: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        tenant_quota: float = 1.0,
    ) -> None:
        """`tenant_quota`: as in Tenant.quota. Blocking."""
        super().__init__(StoredResponse, "responses", disk, max_responses, max_bytes, tenant_quota)

    async def find(self, record_id: str, tenant: Tenant, param: str = "response_id") -> StoredResponse:
        """The stored response of an id. Raises NotFound, or PreviousResponseNotFound where `param` is
        previous_response_id, also for a response of another tenant; StorageUnavailable."""
        if (record := await super().find(record_id, tenant)) is None:
            kind = PreviousResponseNotFound if param == "previous_response_id" else NotFound
            raise kind(_missing(record_id), param=param)
        return record

    async def delete(self, record_id: str, tenant: Tenant) -> bool:
        """Deletes a response. Raises NotFound, also for a response of another tenant, StorageFull,
        StorageUnavailable."""
        if not await super().delete(record_id, tenant):
            raise NotFound(_missing(record_id), param="response_id")
        return True


def _missing(response_id: str) -> str:
    return f"there is no response {response_id[:80]} (any more)"
