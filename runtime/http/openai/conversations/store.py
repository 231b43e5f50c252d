"""Stored conversations. One that is in use is a single object, however many use it, so that each change is
made to what all of them see, in one piece and on the event loop; the store then writes it whole."""

import time
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

import anyio
import msgspec
from msgspec import Struct

from runtime import log
from runtime.errors import InvalidRequest, NotFound, RequestError, StorageFull
from runtime.http.openai.files import new_id
from runtime.http.openai.responses.items import PREFIXES, Item, items_of, messages_of
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.records import RecordStore
from runtime.messages.tenants import Tenant

MAX_ITEMS = 16_384  # of one conversation, as of the input of a response


class StoredConversation(Struct, kw_only=True, weakref=True):
    """A conversation with all its items, the oldest first."""

    id: str
    created_at: int  # unix seconds
    metadata: dict[str, str]
    items: list[Item]
    owner: str = ""  # as in StoredResponse.owner

    @property
    def is_over(self) -> bool:
        """Always: nothing but clients and answers changes it, and these change it in one piece."""
        return True

    def end(self) -> None:
        """Leaves it as it is: there is nothing that a stopped server can have left open."""


class ConversationStore(RecordStore[StoredConversation]):
    """Conversations by id."""

    def __init__(self, disk: Disk | None, tenant_quota: float = 1.0) -> None:
        """`tenant_quota`: as in Tenant.quota. Blocking."""
        super().__init__(StoredConversation, "conversations", disk, tenant_quota=tenant_quota)
        self._used: WeakValueDictionary[str, StoredConversation] = WeakValueDictionary()
        self._opening = anyio.Lock()

    async def open(
        self, conversation_id: str, tenant: Tenant, param: str = "conversation_id"
    ) -> StoredConversation:
        """The conversation of an id, as everything that uses it sees it. Raises NotFound, also for one of
        another tenant; StorageUnavailable."""
        found = self._used.get(conversation_id)
        if found is None:
            async with self._opening:
                found = self._used.get(conversation_id) or await self.find(conversation_id, tenant)
                if found is not None:
                    self._used[conversation_id] = found
        if found is None or not tenant.sees(found.owner):
            raise NotFound(f"there is no conversation {conversation_id[:80]} (any more)", param=param)
        return found

    async def add(self, items: list[Item], metadata: dict[str, str], tenant: Tenant) -> StoredConversation:
        """A new conversation, which is on the disk. Raises InvalidRequest, StorageFull,
        StorageUnavailable."""
        made = StoredConversation(
            id=new_id("conv"), created_at=int(time.time()), metadata=metadata, items=[], owner=tenant.name
        )
        made.items = self.checked(made, items)
        self._check_size(made)
        await self.create(made)
        return made

    def checked(self, conversation: StoredConversation, items: list[Item]) -> list[Item]:
        """Items of a client as they would stand in a conversation. Raises InvalidRequest for items that a
        response could not read, and for too many."""
        complete = items_of(items, "items")
        messages_of(None, complete, "items")
        self.check_number(conversation, len(complete))
        return _joining(conversation, complete)

    def check_number(self, conversation: StoredConversation, count: int) -> None:
        """Raises InvalidRequest where a conversation cannot take so many more items."""
        if len(conversation.items) + count > MAX_ITEMS:
            raise InvalidRequest(
                f"the conversation has {len(conversation.items)} items and may have {MAX_ITEMS}; delete some "
                "of them, or begin another one",
                param="items",
            )

    def change(
        self,
        conversation: StoredConversation,
        *,
        items: list[Item] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Gives a conversation other items or metadata. Raises NotFound for one that was deleted meanwhile,
        StorageFull, StorageUnavailable; nothing has changed then."""
        self.check()
        if self._used.get(conversation.id) is not conversation:
            raise NotFound(f"the conversation {conversation.id} was deleted", param="conversation_id")
        before = conversation.items, conversation.metadata
        conversation.items = conversation.items if items is None else items
        conversation.metadata = conversation.metadata if metadata is None else metadata
        try:
            self._check_size(conversation)
        except RequestError:
            conversation.items, conversation.metadata = before
            raise
        self.put(conversation)

    def join(self, conversation: StoredConversation, items: Sequence[Item]) -> None:
        """Appends the items of an answer and of its input, all or none: none to a conversation that was
        deleted meanwhile, or that has no room for them. While the disk fails, they wait in memory."""
        if self._used.get(conversation.id) is not conversation:
            return
        before = conversation.items
        conversation.items = [*before, *_joining(conversation, items)]
        if not self.put(conversation):
            conversation.items = before
            log.get("conversations").warning(
                "an answer is not in its conversation, which has no room for it", id=conversation.id
            )

    async def remove(self, conversation_id: str, tenant: Tenant) -> None:
        """Deletes a conversation. Raises NotFound, StorageFull, StorageUnavailable."""
        conversation = await self.open(conversation_id, tenant)
        await self.delete(conversation_id, tenant)
        self._used.pop(conversation.id, None)

    def _check_size(self, conversation: StoredConversation) -> None:
        size = len(msgspec.json.encode(conversation))
        if not self.kept.takes(conversation.owner, size):
            raise StorageFull(
                f"the conversation would have {size} bytes, more than may be stored; begin another one"
            )


def _joining(conversation: StoredConversation, items: Sequence[Item]) -> list[Item]:
    """Items as they stand in a conversation: complete, without log probabilities, and with an id that no
    other item there has."""
    taken = {item["id"] for item in conversation.items}
    joining: list[Item] = []
    for item in items:
        name = item["id"] if item["id"] not in taken else new_id(PREFIXES[item["type"]])
        taken.add(name)
        content = item.get("content")
        parts = {"content": [_bare(part) for part in content]} if isinstance(content, list) else {}
        joining.append({"status": "completed"} | item | parts | {"id": name})
    return joining


def _bare(part: object) -> object:
    if not isinstance(part, Mapping) or not part.get("logprobs"):
        return part
    return {**part, "logprobs": []}
