"""The routes of /v1/uploads."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime.http.body import discard_body
from runtime.http.openai.stored.upload import answer_upload
from runtime.http.openai.uploads.store import CompleteBody, UploadBody, UploadObject, UploadPart, Uploads
from runtime.http.operation import Operation, json_response
from runtime.http.tenant_service import tenant_in
from runtime.http.unknown_fields import UnknownFields

MAX_BODY = 1 << 17

CREATE = Operation(
    "POST",
    "/v1/uploads",
    "Begin to upload a file in parts (--file-storage-path)",
    body=UploadBody,
    example={"bytes": 5, "filename": "notes.txt", "mime_type": "text/plain", "purpose": "user_data"},
    answers=(UploadObject,),
)
ADD_PART = Operation(
    "POST",
    "/v1/uploads/{id}/parts",
    "Send a part of an upload",
    form={"data": "@part.bin"},
    answers=(UploadPart,),
)
COMPLETE = Operation(
    "POST",
    "/v1/uploads/{id}/complete",
    "Make a file of the parts of an upload",
    body=CompleteBody,
    example={"part_ids": ["part_0"]},
    answers=(UploadObject,),
)
CANCEL = Operation("POST", "/v1/uploads/{id}/cancel", "Give an upload up", answers=(UploadObject,))
OPERATIONS = (CREATE, ADD_PART, COMPLETE, CANCEL)


def routes(uploads: Uploads, unknown_fields: UnknownFields) -> list[Route]:
    """The routes of uploads."""

    async def add_part(request: Request) -> ASGIApp:
        tenant = tenant_in(request.scope)
        upload_id = request.path_params["id"]
        return await answer_upload(
            request, partial(uploads.add_part, upload_id, request.headers, tenant=tenant)
        )

    async def complete(request: Request, body: CompleteBody) -> UploadObject:
        return await uploads.complete(request.path_params["id"], body, tenant_in(request.scope))

    async def cancel(request: Request) -> Response:
        await discard_body(request.receive)
        return json_response(await uploads.cancel(request.path_params["id"], tenant_in(request.scope)))

    return [
        CREATE.body_route(lambda tenant, body: uploads.create(body, tenant), MAX_BODY, unknown_fields),
        ADD_PART.route(add_part),
        COMPLETE.request_route(complete, MAX_BODY, unknown_fields),
        CANCEL.route(cancel),
    ]
