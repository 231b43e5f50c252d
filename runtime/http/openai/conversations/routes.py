"""The routes of /v1/conversations."""

from operator import itemgetter
from typing import Annotated as A

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import NotFound
from runtime.http.body import discard_body
from runtime.http.fields.query import limit_of
from runtime.http.openai.completion_response import Deleted, ItemPage
from runtime.http.openai.conversations.store import MAX_ITEMS, ConversationStore, StoredConversation
from runtime.http.openai.files import page_of
from runtime.http.openai.responses.items import Item
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.http.tenant_service import tenant_in
from runtime.json_value import Fields, JsonDict

Metadata = A[dict[A[str, Meta(max_length=64)], A[str, Meta(max_length=512)]], Meta(max_length=16)]


class ConversationBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/conversations."""

    items: A[list[JsonDict], Meta(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class UpdateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata | None


class ItemsBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: A[list[JsonDict], Meta(min_length=1, max_length=MAX_ITEMS)]


class Conversation(Struct, frozen=True, kw_only=True):
    """OpenAI's conversation object."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


CREATE = Operation(
    "POST",
    "/v1/conversations",
    "Begin a conversation that responses continue",
    body=ConversationBody,
    example={"items": [{"role": "user", "content": "Hello!"}]},
    answers=(Conversation,),
)
GET = Operation("GET", "/v1/conversations/{id}", "A conversation", answers=(Conversation,))
UPDATE = Operation(
    "POST",
    "/v1/conversations/{id}",
    "Give a conversation other metadata",
    body=UpdateBody,
    example={"metadata": {"topic": "weather"}},
    answers=(Conversation,),
)
DELETE = Operation("DELETE", "/v1/conversations/{id}", "Delete a conversation", answers=(Deleted,))
ADD = Operation(
    "POST",
    "/v1/conversations/{id}/items",
    "Append items to a conversation",
    body=ItemsBody,
    example={"items": [{"role": "user", "content": "Hello!"}]},
    query=("include",),
    answers=(ItemPage,),
)
LIST = Operation(
    "GET",
    "/v1/conversations/{id}/items",
    "The items of a conversation",
    query=("after", "limit", "order", "include"),
    answers=(ItemPage,),
)
GET_ITEM = Operation(
    "GET",
    "/v1/conversations/{id}/items/{item}",
    "An item of a conversation",
    query=("include",),
    answers=(JsonDict,),
)
DELETE_ITEM = Operation(
    "DELETE",
    "/v1/conversations/{id}/items/{item}",
    "Delete an item of a conversation",
    answers=(Conversation,),
)
OPERATIONS = (CREATE, GET, UPDATE, DELETE, ADD, LIST, GET_ITEM, DELETE_ITEM)


class Conversations:
    """The conversations of one server."""

    def __init__(self, store: ConversationStore) -> None:
        self.store = store

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of /v1/conversations."""
        bounds = settings.max_body_bytes, settings.unknown_fields
        return [
            CREATE.request_route(self._create, *bounds),
            GET.route(self._get),
            UPDATE.request_route(self._update, *bounds),
            DELETE.route(self._delete),
            ADD.request_route(self._add, *bounds),
            LIST.route(self._list),
            GET_ITEM.route(self._get_item),
            DELETE_ITEM.route(self._delete_item),
        ]

    async def _open(self, request: Request) -> StoredConversation:
        return await self.store.open(request.path_params["id"], tenant_in(request.scope))

    async def _create(self, request: Request, body: ConversationBody) -> Conversation:
        return _shown(await self.store.add(body.items or [], body.metadata or {}, tenant_in(request.scope)))

    async def _get(self, request: Request) -> Response:
        return json_response(_shown(await self._open(request)))

    async def _update(self, request: Request, body: UpdateBody) -> Conversation:
        conversation = await self._open(request)
        self.store.change(conversation, metadata=body.metadata or {})
        return _shown(conversation)

    async def _delete(self, request: Request) -> Response:
        await discard_body(request.receive)
        conversation_id = request.path_params["id"]
        await self.store.remove(conversation_id, tenant_in(request.scope))
        return json_response(Deleted(conversation_id, "conversation.deleted", True))

    async def _add(self, request: Request, body: ItemsBody) -> Fields:
        conversation = await self._open(request)
        items = self.store.checked(conversation, body.items)
        self.store.change(conversation, items=[*conversation.items, *items])
        return page_of(items, after=None, limit=len(items), order="asc", id_of=itemgetter("id"))

    async def _list(self, request: Request) -> Response:
        conversation = await self._open(request)
        page = page_of(
            conversation.items,
            after=request.query_params.get("after"),
            limit=limit_of(request, 100, 20),
            order=request.query_params.get("order", "desc"),
            id_of=itemgetter("id"),
        )
        return json_response(page)

    async def _get_item(self, request: Request) -> Response:
        conversation = await self._open(request)
        return json_response(conversation.items[_position(conversation, request)])

    async def _delete_item(self, request: Request) -> Response:
        await discard_body(request.receive)
        conversation = await self._open(request)
        position = _position(conversation, request)
        rest: list[Item] = [*conversation.items[:position], *conversation.items[position + 1 :]]
        self.store.change(conversation, items=rest)
        return json_response(_shown(conversation))


def _position(conversation: StoredConversation, request: Request) -> int:
    """Where the item of a request is. Raises NotFound."""
    name = request.path_params["item"]
    for position, item in enumerate(conversation.items):
        if item["id"] == name:
            return position
    raise NotFound(f"there is no item {name[:80]} in this conversation", param="item_id")


def _shown(conversation: StoredConversation) -> Conversation:
    return Conversation(
        id=conversation.id, created_at=conversation.created_at, metadata=conversation.metadata
    )
