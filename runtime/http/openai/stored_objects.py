"""Objects that the server stores: responses, and with --file-storage-path files and batches."""

import fcntl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive

from runtime.errors import InvalidRequest, NotFound, StartError, TooLarge
from runtime.http.body import discard_body
from runtime.http.embeddings.embeddings import embeddings
from runtime.http.openai.batch_runner import BatchRunner
from runtime.http.openai.batches import Batch, BatchBody, Batches, Record, Serve
from runtime.http.openai.chat import chat
from runtime.http.openai.completion_response import BatchPage, Deleted, FilePage
from runtime.http.openai.completions import completions
from runtime.http.openai.files import LIST_LIMIT, MAX_FILE_BYTES, File, Files, in_thread, page_of
from runtime.http.openai.responses.routes import Responses
from runtime.http.openai.responses.store import ResponseStore
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.messages.tenants import Tenant
from runtime.options.plan import Plan
from runtime.service import Service

ENDPOINTS: dict[str, Serve] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
}
FORM_BYTES = 1 << 20  # of an upload in addition to the file itself
MAX_BATCH_BODY = 1 << 16
PAGE = ("after", "limit", "order")  # query parameters of lists
UPLOAD = Operation("POST", "/v1/files", "Upload a file (--file-storage-path)", answers=(File,), has_form=True)
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

    def __init__(self, service: Service, folder: Path | None = None, max_bytes: int = 0) -> None:
        """Raises StartError."""
        self.storage = None if folder is None else Storage(service, folder, max_bytes)
        self.responses = Responses(
            service, ResponseStore(None if folder is None else folder / "responses.sqlite")
        )

    async def run(self) -> None:
        """Computes background responses and batches until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.responses.run)
            if self.storage is not None:
                tasks.start_soon(self.storage.run)

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of responses, files and batches."""
        return [
            *self.responses.routes(settings),
            *(no_storage() if self.storage is None else self.storage.routes()),
        ]


class Storage:
    """Files and batches of one folder, which is locked for one server."""

    def __init__(self, service: Service, folder: Path, max_bytes: int) -> None:
        """Raises StartError."""
        self.files = Files(folder, max_bytes)
        self._lock = (folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StartError(
                f"--file-storage-path {folder} is in use by another server; give each its own folder"
            ) from None
        self.batches = Batches(self.files, ENDPOINTS)
        self.files.sweep(self.batches.unfinished_files())
        self._runner = BatchRunner(service, self.batches)

    async def run(self) -> None:
        """Runs batches until cancelled."""
        try:
            await self._runner.run()
        finally:
            self._lock.close()

    def routes(self) -> list[Route]:
        """The routes of files and batches."""
        return [
            UPLOAD.route(self._upload),
            LIST_FILES.json_route(self._list_files),
            GET_FILE.json_route(lambda request: self.files.find(request.path_params["id"])),
            DELETE_FILE.route(self._delete),
            FILE_CONTENT.route(self._content),
            CREATE_BATCH.body_route(self._create, MAX_BATCH_BODY),
            LIST_BATCHES.json_route(self._list_batches),
            GET_BATCH.json_route(lambda request: self._record(request).batch),
            CANCEL_BATCH.route(self._cancel),
        ]

    async def _upload(self, request: Request) -> Response:
        limited = Request(request.scope, _limited(request.receive, MAX_FILE_BYTES + FORM_BYTES))
        try:
            async with limited.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                if not isinstance(upload, UploadFile):
                    raise InvalidRequest(
                        "file is missing: send multipart/form-data with file and purpose", param="file"
                    )
                if not isinstance(purpose, str):
                    raise InvalidRequest(
                        "purpose is missing: send multipart/form-data with file and purpose", param="purpose"
                    )
                file: File = await in_thread(self.files.save, upload.file, upload.filename or "file", purpose)
        except MultiPartException as error:
            raise InvalidRequest(f"the form can't be read: {error.message}", param="file") from None
        return json_response(file)

    def _list_files(self, request: Request) -> dict[str, Any]:
        return self.files.page(purpose=request.query_params.get("purpose"), **_range(request, LIST_LIMIT))

    async def _delete(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        if file_id in self.batches.unfinished_files():
            raise InvalidRequest(
                "a batch that is not over needs this file; cancel the batch first", param="file_id"
            )
        await in_thread(self.files.delete, file_id)
        return json_response(Deleted(file_id, "file", True))

    async def _content(self, request: Request) -> Response:
        file = self.files.find(request.path_params["id"])
        return FileResponse(
            self.files.path(file.id), media_type="application/octet-stream", filename=file.filename
        )

    async def _create(self, _: Tenant, body: BatchBody) -> Batch:
        record = await in_thread(self.batches.create, body)
        self._runner.add(record)
        return record.batch

    def _list_batches(self, request: Request) -> dict[str, Any]:
        return page_of(
            [record.batch for record in self.batches.known.values()],
            order="desc",
            **_range(request, 100, ordered=False),
        )

    def _record(self, request: Request) -> Record:
        return self.batches.find(request.path_params["id"])

    async def _cancel(self, request: Request) -> Response:
        record = self._record(request)
        await self._runner.cancel(record)
        return json_response(record.batch)


def open_stored_objects(service: Service, plan: Plan) -> StoredObjects:
    """The stored objects that the options ask for. Raises StartError when the folder can't be used."""
    return StoredObjects(
        service,
        None if plan.api.file_storage_path is None else Path(plan.api.file_storage_path),
        plan.api.file_storage_bytes,
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


def _range(request: Request, most: int, *, ordered: bool = True) -> dict[str, Any]:
    limit = request.query_params.get("limit", str(most if ordered else 20))
    if not limit.isdigit() or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}", param="limit")
    order = {"order": request.query_params.get("order", "desc")} if ordered else {}
    return {"after": request.query_params.get("after"), "limit": int(limit), **order}


def _limited(receive: Receive, max_bytes: int) -> Callable[[], Awaitable[Message]]:
    """`receive` that raises TooLarge for bodies over `max_bytes`."""
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise TooLarge(f"the file is over {MAX_FILE_BYTES} bytes, the most that this server takes")
        return message

    return receive_some
