"""Objects that the server stores: responses, and with --file-storage-path files and batches."""

from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from runtime.errors import InvalidRequest, NotFound, RequestError, StorageFull, StorageUnavailable
from runtime.http.body import discard_body, respond_early
from runtime.http.embeddings.embeddings import embeddings
from runtime.http.errors import error_response, path_of
from runtime.http.fields.query import limit_of
from runtime.http.openai.batch_lines import MAX_LINE_BYTES
from runtime.http.openai.batch_runner import BatchRunner
from runtime.http.openai.batches import Batch, BatchBody, Batches, Record, Serve
from runtime.http.openai.chat import chat
from runtime.http.openai.completion_response import BatchPage, Deleted, FilePage
from runtime.http.openai.completions import completions
from runtime.http.openai.files import LIST_LIMIT, File, Files, StoredFile, page_of
from runtime.http.openai.responses.routes import Responses
from runtime.http.openai.responses.store import ResponseStore
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.folder import Folder
from runtime.http.openai.stored.quota import Quota
from runtime.http.openai.stored.tasks import StoredTasks
from runtime.http.openai.stored.upload import receive_file
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings, has_tenants
from runtime.http.tenant_service import tenant_in
from runtime.http.unknown_fields import REFUSING, UnknownFields
from runtime.json_value import Fields
from runtime.messages.tenants import Tenant
from runtime.metrics import Metrics
from runtime.options.plan import Plan
from runtime.service import Service

ENDPOINTS: dict[str, Serve] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
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
)

NEEDS_PATH = "this server stores no files; start it with --file-storage-path FOLDER"


class StoredObjects:
    """Responses, and the folder that makes them persistent together with files and batches. `run` has to run
    while the routes are served."""

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
        self.responses = Responses(service, ResponseStore(disk, tenant_quota=tenant_quota), self._tasks)

    async def run(self) -> None:
        """Computes background responses and batches until cancelled."""
        try:
            await self._tasks.run()
        finally:
            if self._disk is not None:
                with anyio.move_on_after(CLOSE_S, shield=True), suppress(StorageFull, StorageUnavailable):
                    await self._disk.run(self.responses.store.close)
                self._disk.close()

    def close(self) -> None:
        """Closes the files of objects that were never run. Blocking."""
        self.responses.store.close()
        if self._disk is not None:
            self._disk.close()

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of responses, files and batches."""
        return [
            *self.responses.routes(settings),
            *(no_storage() if self.storage is None else self.storage.routes()),
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
        endpoints = {path: unknown_fields.serving(serve, path) for path, serve in ENDPOINTS.items()}
        self.batches = Batches(self.files, endpoints, max_line_bytes)
        self.files.sweep(self.batches.unfinished_files(), deletes=not self.batches.is_damaged)
        self._runner = BatchRunner(service, self.batches, tasks)

    def routes(self) -> list[Route]:
        """The routes of files and batches."""
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
        ]

    async def _upload(self, request: Request) -> ASGIApp:
        has_come = False  # the whole body

        async def receive() -> Message:
            nonlocal has_come
            message = await request.receive()
            has_come = not message.get("more_body", False)
            return message

        try:
            tenant = tenant_in(request.scope)
            file = await receive_file(request.headers, receive, self.files, tenant)
            return json_response(file.shown())
        except RequestError as error:
            refusal = error_response(error, path_of(request))
            return refusal if has_come else respond_early(refusal)

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
        record = await self.batches.create(body, tenant)
        self._runner.add(record)
        return record.batch

    def _list_batches(self, request: Request) -> Fields:
        tenant = tenant_in(request.scope)
        return page_of(
            [record.batch for record in self.batches.known.values() if tenant.sees(record.owner)],
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
    return [
        Route(path, refuse, methods=every)
        for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
    ]


def _range(request: Request, most: int, *, ordered: bool = True) -> Fields:
    limit = limit_of(request, most, most if ordered else 20)
    order = {"order": request.query_params.get("order", "desc")} if ordered else {}
    return {"after": request.query_params.get("after"), "limit": limit, **order}
