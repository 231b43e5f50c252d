"""From errors to answers: every refusal leaves as {"error": {message, type, param, code}} with its status."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InternalFault, InvalidRequest, NotFound, RequestError

T = TypeVar("T")

HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}  # seconds that a polite client waits
_DEPTH = "the JSON is nested too deeply"

# msgspec ends its messages with the place: " - at `$.messages[0].role`" or " - at `key` in `$.logit_bias`"
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?P<kind>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error answer, and the payload of an error event in a stream."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    return Response(msgspec.json.encode(error_object(error)), error.status, HEADERS.get(error.status), "application/json")


def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method, a body that came too slowly."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: (f"there is no route {request.url.path}", "not_found"),
        405: (f"{request.url.path} does not take {request.method}", "method_not_allowed"),
        408: (error.detail, "request_timeout"),
    }.get(error.status_code, (error.detail, "bad_request"))
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Response(msgspec.json.encode(body), error.status_code, error.headers, "application/json")


def on_bug(_: Request, __: Exception) -> Response:
    """What nobody expected. The server under us logs the stack; the client gets an apology."""
    return error_response(InternalFault("something went wrong in the server; its log has the details"))


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest for anything but the JSON that `decoder` wants; `param` is the path of the wrong field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error, known=getattr(decoder.type, "__struct_fields__", ())) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest(_DEPTH) from None


def convert(value: Any, kind: type[T], names: Mapping[str, str]) -> T:
    """`value` as a `kind`. Raises InvalidRequest; `names` maps the fields of `kind` to what the client calls them."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise renamed(invalid(error, known=getattr(kind, "__struct_fields__", ())), names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, told in the client's names: `max_new_tokens` is `max_tokens` in some dialects."""
    if error.param is None:
        return error
    root = re.split(r"[.\[]", error.param, maxsplit=1)[0]
    if (name := names.get(root)) is None:
        return error
    message = re.sub(rf"\b{re.escape(root)}\b", name, error.message)
    return type(error)(message, param=name + error.param[len(root):])


def invalid(error: msgspec.ValidationError, known: tuple[str, ...] = ()) -> InvalidRequest:
    """A msgspec error with its place as `param`. `known` are the top-level fields, to suggest the nearest."""
    match = _PLACE.match(str(error))
    assert match is not None
    what, path = match["what"].replace("`", ""), (match["path"] or "").removesuffix("[...]")
    field = _FIELD.search(match["what"])
    if field is None:
        return InvalidRequest(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", param=path or None)
    param = f"{path}.{field['name']}" if path else field["name"]
    if field["kind"].startswith("missing"):
        return InvalidRequest(f"{param} is missing", param=param)
    near = [] if path else get_close_matches(field["name"], known, n=1)
    return InvalidRequest(f"{param} is not a known field" + (f"; did you mean {near[0]}?" if near else ""), param=param)
