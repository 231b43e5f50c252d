"""The console at /console: its page, and the files that the page needs. GET / leads browsers to it.

The files lie beside this module and are served from memory. The page has relative links alone, so it works
under any prefix. What the server tells it comes over the same routes, and with the same keys, as for any
other client.
"""

from functools import cache
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import NotFound
from runtime.http.operation import Operation

FOLDER = Path(__file__).parent
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own scripts alone, makes no markup of texts (trusted types), speaks to this server only,
# and is in no frame of another page.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # browsers keep the files, and ask whether they are still these
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

GREETING = Operation(
    "GET",
    "/",
    "A greeting, by which Ollama's clients look for a server; browsers are led to the console",
    media="text",
)
CONSOLE = Operation("GET", "/console", "Chat, live figures, running requests and options", media="html")
FILE = Operation("GET", "/console/{name}", "A script, style or picture of the console", media="any")
OPERATIONS = (GREETING, CONSOLE, FILE)


class File(Struct, frozen=True):
    """A file of the page, as it is served."""

    content: bytes
    media_type: str
    tag: str  # the ETag


@cache
def files() -> dict[str, File]:
    """The files of the page by name, read once."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if (media_type := MEDIA_TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            found[path.name] = File(content, media_type, f'"{blake2b(content, digest_size=12).hexdigest()}"')
    return found


def routes(*, is_enabled: bool) -> list[Route]:
    """The routes. Without the console: the greeting alone, for browsers too."""
    if not is_enabled:
        return [GREETING.route(_greet)]
    return [GREETING.route(_greet_or_lead), CONSOLE.route(_page), FILE.route(_file)]


def wants_page(accept: str) -> bool:
    """Whether an Accept header is a browser's, which names HTML; clients of the API don't."""
    return "text/html" in accept.lower()


async def _greet(_: Request) -> Response:
    return Response("runtime is running; /docs lists what it serves\n", media_type="text/plain")


async def _greet_or_lead(request: Request) -> Response:
    if wants_page(request.headers.get("accept", "")):
        # relative: the prefix under which this server is mounted stays
        answer = Response(status_code=307, headers={"location": "console"})
    else:
        answer = await _greet(request)
    answer.headers["vary"] = "accept"
    return answer


async def _page(request: Request) -> Response:
    return _answer(request, files()[PAGE])


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    file = None if name == PAGE else files().get(name)  # the page's links lead nowhere from here
    if file is None:
        raise NotFound(f"the console has no file {name[:80]!r}; its page is /console")
    return _answer(request, file)


def _answer(request: Request, file: File) -> Response:
    headers = HEADERS | {"etag": file.tag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
