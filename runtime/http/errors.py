"""Answers to failed requests: {"error": {message, type, param, code}} with the error's status, and the forms
of Anthropic and Ollama on their routes."""

import codecs
import gc
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope

from runtime.errors import InternalFault, InvalidRequest, NotFound, RequestError, TooLong
from runtime.http.absent_routes import instead
from runtime.http.body import discard_body
from runtime.http.json_weight import UNWEIGHED_BYTES
from runtime.http.permitted_values import permitted_values
from runtime.json_value import Fields

T = TypeVar("T")

# seconds that a polite client waits
HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # how their paths begin
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MAX_NAME_CHARS = 100
_DEPTH = "the JSON is nested too deeply"

# msgspec ends its messages with the path: " - at `$.messages[0].role`" or " - at `key` in `$.logit_bias`"
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
# an escape of half a surrogate pair, which is what is left where a client cut a text within a character
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_FIELD = re.compile(r"(?P<kind>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class UnknownField(InvalidRequest):
    """A body has a field that its type has not."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        parent: str = "",
        name: str = "",
        known: tuple[str, ...] = (),
    ) -> None:
        """`parent`: msgspec's path of the object that has the field `name`; "": the body itself. `known`:
        the fields of the body."""
        super().__init__(message, param=param)
        self.parent = parent
        self.name = name
        self.known = known


class Problem(Struct, forbid_unknown_fields=True):
    """The error in OpenAI's form; `param` is the wrong field."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(Struct, forbid_unknown_fields=True):
    """The body of an error answer, and the last event of a stream that failed."""

    error: Problem


class AnthropicProblem(Struct, forbid_unknown_fields=True):
    """The error in Anthropic's form."""

    type: str
    message: str
    details: Fields | UnsetType = UNSET  # what clients act upon


class AnthropicError(Struct, tag_field="type", tag="error", forbid_unknown_fields=True):
    """The body of an error answer on Anthropic's routes."""

    error: AnthropicProblem


class OllamaError(Struct, forbid_unknown_fields=True):
    """The body of an error answer on Ollama's routes."""

    error: str


Body = OpenAIError | AnthropicError | OllamaError


def error_object(error: RequestError) -> OpenAIError:
    """The body of an error answer, and the payload of an error event in a stream."""
    return _openai(error.message, error.type, error.param, error.code)


def anthropic_error(error: RequestError) -> AnthropicError:
    """The body of an error answer on Anthropic's routes, and the payload of an error event."""
    return _anthropic(error.message, error.status, error.details)


def error_response(error: RequestError, path: str) -> Response:
    """The answer to a failed request, in the form of the API that `path` belongs to."""
    return _encoded(error_body(error, path), error.status, HEADERS.get(error.status))


def on_request_error(request: Request, error: Exception) -> Response:
    """The answer to a RequestError."""
    assert isinstance(error, RequestError)
    return error_response(error, form_of(request.scope))


async def on_http_error(request: Request, error: Exception) -> Response:
    """The answer to an HTTPException: no such route, wrong method, a body that came too slowly."""
    assert isinstance(error, HTTPException)
    path = path_of(request)
    if error.status_code in (404, 405) and request.method != "GET":
        # else the connection ends, while the client may send its next request
        await discard_body(request.receive)
    message, code = {
        404: (f"there is no route {path}{_hint(request, path)}", "not_found"),
        405: (f"{path} does not take {request.method}{_remedy(path)}", "method_not_allowed"),
        408: (error.detail, "request_timeout"),
    }.get(error.status_code, (error.detail, "bad_request"))
    body = _body(form_of(request.scope), error.status_code, message, "invalid_request_error", None, code)
    return _encoded(body, error.status_code, error.headers)


def on_bug(request: Request, __: Exception) -> Response:
    """The answer to an unexpected error, without details; the server logs the stack."""
    return error_response(
        InternalFault("something went wrong in the server; its log has the details"), form_of(request.scope)
    )


def path_of(request: Request) -> str:
    """The request's path without the prefix under which the application is mounted."""
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


def nearest_path(path: str, known: Collection[str]) -> str | None:
    """The one of `known` paths that a client with a wrong base URL or a misspelt path most likely meant."""
    wanted = path.rstrip("/")
    if f"/v1{wanted}" in known:
        return f"/v1{wanted}"
    longest_first = sorted(known, key=len, reverse=True)
    inside = (one for one in longest_first if wanted.endswith(one))
    return next(inside, next(iter(get_close_matches(wanted, known, n=1, cutoff=0.85)), None))


def _remedy(path: str) -> str:
    return f"; {remedy}" if (remedy := instead(path)) else ""


def _hint(request: Request, path: str) -> str:
    if remedy := _remedy(path):
        return remedy
    routes = request.app.routes if "app" in request.scope else ()
    if any(isinstance(one, WebSocketRoute) and one.path == path for one in routes):
        return " for requests; open it as a WebSocket"
    known = [one.path for one in routes if isinstance(one, Route) and "{" not in one.path and one.path != "/"]
    near = nearest_path(path, known)
    return f"; did you mean {near}?" if near else ""


def form_of(scope: Scope) -> str:
    """A path of the API in whose form the client reads errors: the request's own, but Anthropic's clients
    also ask for /v1/models."""
    if any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return ANTHROPIC
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def error_body(error: RequestError, path: str) -> Body:
    """The body of an error answer, in the form of the API that `path` belongs to."""
    if path.startswith(ANTHROPIC):
        return anthropic_error(error)
    return _body(path, error.status, error.message, error.type, error.param, error.code)


def _encoded(body: Body, status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _body(path: str, status: int, message: str, kind: str, param: str | None, code: str) -> Body:
    if path.startswith(ANTHROPIC):
        return _anthropic(message, status)
    if path.startswith(OLLAMA):
        return OllamaError(message)
    return _openai(message, kind, param, code)


def _openai(message: str, kind: str, param: str | None, code: str) -> OpenAIError:
    return OpenAIError(Problem(message, kind, param, code))


def _anthropic(message: str, status: int, details: Fields | None = None) -> AnthropicError:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicError(AnthropicProblem(kind, message, UNSET if details is None else details))


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body. Raises InvalidRequest for anything but the JSON that `decoder` takes; `param` is the
    path of the wrong field."""
    if not body:
        raise InvalidRequest("the body is empty; send JSON")
    try:
        return decoder.decode(body) if len(body) <= UNWEIGHED_BYTES else _decode_large(body, decoder)
    except msgspec.ValidationError as error:
        raise invalid(error, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {json_fault(body, error)}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest(_DEPTH) from None


def json_fault(body: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong with JSON, also where msgspec calls it truncated or an invalid character."""
    if body.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark; send it without"
    if half := _HALF_PAIR.search(body):
        return f"{half[0].decode()} is half a surrogate pair (byte {half.start()}); send the whole character"
    return str(error)


def _decode_large(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes without collections of garbage, which would look at all new objects again and again."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return decoder.decode(body)
    finally:
        if is_collecting:
            gc.enable()


def convert(value: object, kind: type[T], names: Mapping[str, str]) -> T:
    """`value` as a `kind`. Raises InvalidRequest; `names` maps fields of `kind` to the client's names for
    them."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = invalid(error, kind)
        raise renamed(InvalidRequest(found.message, param=found.param), names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the client's names of fields: `max_new_tokens` is `max_tokens` in some APIs."""
    if error.param is None:
        return error
    root = re.split(r"[.\[]", error.param, maxsplit=1)[0]
    if (name := names.get(root)) is None:
        return error
    message = (
        error.message
        if isinstance(error, TooLong)
        else re.sub(rf"\b{re.escape(root)}\b", name, error.message)
    )
    return type(error)(message, param=name + error.param[len(root) :])


def invalid(error: msgspec.ValidationError, kind: object, whole: str = "the body") -> InvalidRequest:
    """A msgspec error as InvalidRequest, with the path of the wrong field as `param`. `kind` is the type that
    the body should have had: it says which values a field takes, and which field's name is nearest. `whole`
    is what it calls the body."""
    known: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    match = _PATH.match(str(error))
    assert match is not None
    what, path = match["what"].replace("`", ""), (match["path"] or "").removesuffix("[...]")
    field = _FIELD.search(match["what"])
    if field is None:
        place = f"a key of {path}" if match["key"] else path or whole
        value, values = _VALUE.fullmatch(what), permitted_values(kind, path)
        if value is not None and values:
            what = f"{value['value'][:MAX_NAME_CHARS]} is none of {', '.join(values)}"
        return InvalidRequest(f"{place}: {what[:1].lower()}{what[1:]}", param=path or None)
    name = field["name"][:MAX_NAME_CHARS]  # the client's own: as long as it likes
    param = f"{path}.{name}" if path else name
    if field["kind"].startswith("missing"):
        return InvalidRequest(f"{param} is missing", param=param)
    near = [] if path else get_close_matches(name, known, n=1)
    return UnknownField(
        f"{param} is not a known field" + (f"; did you mean {near[0]}?" if near else ""),
        param=param,
        parent=match["path"] or "",
        name=field["name"],
        known=known,
    )
