"""POST /open_session and /close_session: sessions of requests that continue each other, in SGLang's form."""

from typing import Annotated as A

from msgspec import Meta, Struct
from starlette.responses import Response

from runtime.http.operation import Operation
from runtime.service import Service


class OpenSessionBody(Struct, frozen=True):
    """The body of /open_session. `streaming`: each request continues the previous one."""

    capacity_of_str_len: A[int, Meta(ge=1, le=2**40)]
    session_id: A[str, Meta(min_length=1, max_length=256)] | None = None
    streaming: bool | None = None
    # seconds without a request, after which it is closed
    timeout: A[float, Meta(gt=0, le=31_536_000)] | None = None


class CloseSessionBody(Struct, frozen=True):
    """The body of /close_session."""

    session_id: str


async def open_session(service: Service, body: OpenSessionBody) -> str:
    """The id of a new session. Raises InvalidRequest, Overloaded."""
    return service.control.open_session(
        body.capacity_of_str_len,
        body.session_id,
        body.timeout,
        is_line=bool(body.streaming),
        tenant=service.tenant,
    )


async def close_session(service: Service, body: CloseSessionBody) -> Response:
    """Ends a session; its running requests go on. Raises NotFound."""
    service.control.close_session(body.session_id, service.tenant)
    return Response()


OPERATIONS = (
    Operation(
        "GET POST",
        "/open_session",
        "Open a session of requests that continue each other",
        body=OpenSessionBody,
        example={"capacity_of_str_len": 1000},
        answers=(str,),
        call=open_session,
    ),
    Operation(
        "GET POST",
        "/close_session",
        "Close a session",
        body=CloseSessionBody,
        example={"session_id": "s"},
        call=close_session,
    ),
)
