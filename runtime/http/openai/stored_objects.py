"""Objects that the server stores: responses and conversations, and with --file-storage-path files, batches
and uploads."""

from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive

from runtime.errors import InvalidRequest, NotFound, StorageFull, StorageUnavailable
from runtime.http.anthropic import message_batches
from runtime.http.anthropic.messages import messages
from runtime.http.body import discard_body
from runtime.http.embeddings.embeddings import embeddings
from runtime.http.fields.query import limit_of
from runtime.http.openai.batch_lines import MAX_LINE_BYTES
from runtime.http.openai.batch_runner import BatchRunner
from runtime.http.openai.batches import Batch, BatchBody, Batches, Record, Serve, batches_of
from runtime.http.openai.chat import chat
from runtime.http.openai.completion_response import BatchPage, Deleted, FilePage
from runtime.http.openai.completions import completions
from runtime.http.openai.conversations.routes import Conversations
from runtime.http.openai.conversations.store import ConversationStore
from runtime.http.openai.files import LIST_LIMIT, File, Files, StoredFile, page_of
from runtime.http.openai.responses.routes import Responses
from runtime.http.openai.responses.store import ResponseStore
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.folder import Folder
from runtime.http.openai.stored.quota import Quota
from runtime.http.openai.stored.tasks import StoredTask, StoredTasks
from runtime.http.openai.stored.upload import answer_upload, receive_file
from runtime.http.openai.uploads import routes as uploads
from runtime.http.openai.uploads.store import Uploads
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings, has_tenants
from runtime.http.tenant_service import tenant_in
from runtime.http.unknown_fields import REFUSING, UnknownFields
from runtime.json_value import Fields
from runtime.messages.tenants import Tenant
from runtime.metrics import Metrics
from runtime.options.plan import Plan
from runtime.service import Service

SERVE: dict[str, Serve] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    message_batches.ENDPOINT: messages,
}
MAX_BATCH_BODY = 1 << 16
CLOSE_S = 2.0  # to close the files when the server stops
PAGE = ("after", "limit", "order")  # query parameters of lists
UPLOAD = Operation(
    "POST",
    "/v1/files",
    "Upload a file (--file-storage-path)",
    answers=(File,),
    form={"file": "@requests.jsonl", "purpose": "batch"},
)
LIST_FILES = Operation("GET", "/v1/files", "The stored files", answers=(FilePage,), query=("purpose", *PAGE))
GET_FILE = Operation("GET", "/v1/files/{id}", "A stored file", answers=(File,))
DELETE_FILE = Operation("DELETE", "/v1/files/{id}", "Delete a file", answers=(Deleted,))
FILE_CONTENT = Operation("GET", "/v1/files/{id}/content", "The bytes of a file", media="binary")
CREATE_BATCH = Operation(
    "POST",
    "/v1/batches",
    "Answer the requests of a file in idle time",
    body=BatchBody,
    example={"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    answers=(Batch,),
)
LIST_BATCHES = Operation("GET", "/v1/batches", "The batches", answers=(BatchPage,), query=("after", "limit"))
GET_BATCH = Operation("GET", "/v1/batches/{id}", "A batch", answers=(Batch,))
CANCEL_BATCH = Operation("POST", "/v1/batches/{id}/cancel", "Stop a batch", answers=(Batch,))
OPERATIONS = (
    UPLOAD,
    LIST_FILES,
    GET_FILE,
    DELETE_FILE,
    FILE_CONTENT,
    CREATE_BATCH,
    LIST_BATCHES,
    GET_BATCH,
    CANCEL_BATCH,
    *uploads.OPERATIONS,
)

NEEDS_PATH = "this server stores no files; start it with --file-storage-path FOLDER"


class StoredObjects:
    """Responses and conversations, and the folder that makes them persistent together with files, batches and
    uploads. `run` has to run while the routes are served."""

    def __init__(
        self,
        service: Service,
        folder: Path | None = None,
        max_bytes: int = 0,
        metrics: Metrics | None = None,
        tenant_quota: float = 1.0,
        max_line_bytes: int = MAX_LINE_BYTES,
        unknown_fields: UnknownFields = REFUSING,
    ) -> None:
        """`metrics` count what fails. `tenant_quota`: as in Tenant.quota; `max_line_bytes`: of a line of a
        batch. Blocking. Raises StartError when the folder can't be used; what is damaged in it goes to
        quarantine."""
        metrics = Metrics() if metrics is None else metrics
        self._tasks = StoredTasks(metrics)
        disk = None if folder is None else Disk(Folder(folder, metrics.quarantined_files.add), metrics)
        self._disk = disk
        self.storage = (
            None
            if disk is None
            else Storage(
                service, disk, Quota(max_bytes, tenant_quota), self._tasks, max_line_bytes, unknown_fields
            )
        )
        self.conversations = Conversations(ConversationStore(disk, tenant_quota))
        self.responses = Responses(
            service, ResponseStore(disk, tenant_quota=tenant_quota), self.conversations.store, self._tasks
        )

    async def run(self) -> None:
        """Computes background responses and batches until cancelled."""
        try:
            await self._tasks.run()
        finally:
            if self._disk is not None:
                with anyio.move_on_after(CLOSE_S, shield=True), suppress(StorageFull, StorageUnavailable):
                    await self._disk.run(self._close_stores)
                self._disk.close()

    def close(self) -> None:
        """Closes the files of objects that were never run. Blocking."""
        self._close_stores()
        if self._disk is not None:
            self._disk.close()

    def _close_stores(self) -> None:
        self.responses.store.close()
        self.conversations.store.close()

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of responses, conversations, files and batches."""
        return [
            *self.responses.routes(settings),
            *self.conversations.routes(settings),
            *(no_storage() if self.storage is None else self.storage.routes(settings)),
        ]


class Storage:
    """Files and batches of one folder."""

    def __init__(
        self,
        service: Service,
        disk: Disk,
        quota: Quota,
        tasks: StoredTasks,
        max_line_bytes: int,
        unknown_fields: UnknownFields,
    ) -> None:
        """Blocking."""
        self.unknown_fields = unknown_fields
        self.files = Files(disk, quota)
        endpoints = {path: unknown_fields.serving(serve, path) for path, serve in SERVE.items()}
        self.batches = Batches(self.files, endpoints, max_line_bytes)
        self.files.sweep(self.batches.unfinished_files(), deletes=not self.batches.is_damaged)
        self._runner = BatchRunner(service, self.batches, tasks)
        self._message_batches = message_batches.MessageBatches(self.batches, self._runner)
        self.uploads = Uploads(self.files)
        tasks.start(StoredTask("uploads", "uploads", self.uploads.run, self.uploads.run))

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of files, batches of both APIs, and uploads."""
        return [
            UPLOAD.route(self._upload),
            LIST_FILES.json_route(self._list_files),
            GET_FILE.json_route(lambda request: self._file(request).shown()),
            DELETE_FILE.route(self._delete),
            FILE_CONTENT.route(self._content),
            CREATE_BATCH.body_route(self._create, MAX_BATCH_BODY, self.unknown_fields),
            LIST_BATCHES.json_route(self._list_batches),
            GET_BATCH.json_route(lambda request: self._record(request).batch),
            CANCEL_BATCH.route(self._cancel),
            *uploads.routes(self.uploads, self.unknown_fields),
            *self._message_batches.routes(settings),
        ]

    async def _upload(self, request: Request) -> ASGIApp:
        async def receive(body: Receive) -> File:
            return (await receive_file(request.headers, body, self.files, tenant_in(request.scope))).shown()

        return await answer_upload(request, receive)

    def _list_files(self, request: Request) -> Fields:
        purpose = request.query_params.get("purpose")
        return self.files.page(tenant_in(request.scope), purpose=purpose, **_range(request, LIST_LIMIT))

    def _file(self, request: Request) -> StoredFile:
        return self.files.find(request.path_params["id"], tenant_in(request.scope))

    async def _delete(self, request: Request) -> Response:
        file_id = self._file(request).id
        if file_id in self.batches.unfinished_files():
            raise InvalidRequest(
                "a batch that is not over needs this file; cancel the batch first", param="file_id"
            )
        await self.files.delete(file_id, tenant_in(request.scope))
        return json_response(Deleted(file_id, "file", True))

    async def _content(self, request: Request) -> Response:
        file = self._file(request)
        reader = await self.files.open(file)
        headers = {
            "content-length": str(file.bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename, safe='')}",
        }
        return StreamingResponse(reader.parts(), headers=headers, media_type="application/octet-stream")

    async def _create(self, tenant: Tenant, body: BatchBody) -> Batch:
        record = self.batches.draft(body, tenant)
        await self.batches.create(record, tenant)
        self._runner.add(record)
        return record.batch

    def _list_batches(self, request: Request) -> Fields:
        tenant = tenant_in(request.scope)
        return page_of(
            [record.batch for record in batches_of(self.batches.known.values(), tenant)],
            order="desc",
            **_range(request, 100, ordered=False),
        )

    def _record(self, request: Request) -> Record:
        return self.batches.find(request.path_params["id"], tenant_in(request.scope))

    async def _cancel(self, request: Request) -> Response:
        record = self._record(request)
        await self._runner.cancel(record)
        return json_response(record.batch)


def open_stored_objects(service: Service, plan: Plan, metrics: Metrics) -> StoredObjects:
    """The stored objects that the options ask for. Raises StartError when the folder can't be used."""
    return StoredObjects(
        service,
        None if plan.api.file_storage_path is None else Path(plan.api.file_storage_path),
        plan.api.file_storage_bytes,
        metrics,
        plan.api.tenant_quota if has_tenants(plan) else 1.0,
        plan.http.max_body_bytes,
        UnknownFields(plan.api.unknown_fields),
    )


def no_storage() -> list[Route]:
    """The routes of files and batches without --file-storage-path: each answers which option is missing."""

    async def refuse(request: Request) -> Response:
        await discard_body(request.receive)
        raise NotFound(NEEDS_PATH)

    every = ["GET", "POST", "DELETE"]
    roots = ("/v1/files", "/v1/batches", "/v1/uploads", "/v1/messages/batches")
    return [Route(path, refuse, methods=every) for root in roots for path in (root, f"{root}/{{rest:path}}")]


def _range(request: Request, most: int, *, ordered: bool = True) -> Fields:
    limit = limit_of(request, most, most if ordered else 20)
    order = {"order": request.query_params.get("order", "desc")} if ordered else {}
    return {"after": request.query_params.get("after"), "limit": limit, **order}
