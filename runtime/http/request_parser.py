"""From the bytes of a connection to requests: llhttp's callbacks, and what makes a head valid here."""

from collections.abc import Callable
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct
from starlette.types import Scope

from runtime.http.request_cycle import RequestCycle

MAX_HEAD_BYTES = (
    2**16
)  # of a request: its target and headers. Up to twice as long, the refusal is one of the API
# not passed on: compressed messages grow a thousandfold when they are read
WS_EXTENSIONS = b"sec-websocket-extensions"
ASGI = {"spec_version": "2.1", "version": "3.0"}


class BadRequest(Exception):
    """What came is no request of HTTP/1.1; `status` is that of the refusal."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Peer(Struct, frozen=True):
    """The two ends of a connection, as ASGI scopes have them."""

    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    root_path: str


class RequestParser:
    """Passes each head to `take` as a scope, and feeds the cycle that it returns with the body."""

    def __init__(
        self, peer: Peer, take: Callable[[Scope, bool], RequestCycle], *, has_h2c: bool = False
    ) -> None:
        """`take(scope, keeps_alive)`: the client may or may not take more answers on its connection.
        `has_h2c`: requests may upgrade it to HTTP/2."""
        self.protocols = (b"websocket", b"h2c") if has_h2c else (b"websocket",)
        self.peer = peer
        self.take = take
        self.incoming: RequestCycle | None = None  # its body is being read
        # its client waits for 100 Continue before it sends the body
        self.expecting: RequestCycle | None = None
        self.is_in_head = False
        # of a request for another protocol, which nothing follows here; empty for HTTP/2
        self.upgrade_head: bytes | None = None
        self.upgrade_scope: Scope | None = None  # of a request for HTTP/2
        self._parser = HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_advanced = False  # by this piece of data: else it only made a head or a trailer longer
        self._num_held = 0  # bytes that did not
        self._status = 400  # of the refusal

    def parse(self, data: bytes) -> bytes | None:
        """Takes the next bytes. Returns those after a request to change the protocol, else None.

        When `upgrade_head` is None then, the change is to one that is not spoken here, and the request is one
        like others: go on with `restart`. Raises BadRequest.
        """
        self._has_advanced = False
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            return data[upgrade.args[0] :]
        except HttpParserError:
            raise BadRequest(self._status) from None
        self._num_held = 0 if self._has_advanced else self._num_held + len(data)
        if self._num_held > 2 * MAX_HEAD_BYTES:
            raise BadRequest(431)
        return None

    def restart(self) -> None:
        """Begins with a new request."""
        self._parser = HttpRequestParser(self)

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        self.is_in_head = self._has_advanced = True
        self._target = b""
        self._headers = []

    def on_url(self, target: bytes) -> None:
        """Called by the parser for each piece of the target."""
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header, and for the trailers of a body, which are dropped."""
        if self.is_in_head:
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of a head. Raises BadRequest, which the parser reports as an
        error."""
        self.is_in_head, self._has_advanced = False, True
        target, headers, parser = self._target, self._headers, self._parser
        num_hosts, size, upgrade, waits = 0, len(target), b"", False
        for name, value in headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                num_hosts += 1
            elif name == b"upgrade":
                upgrade = value.lower()
            elif name == b"expect":
                waits = value.lower() == b"100-continue"
        version = parser.get_http_version()
        if size > 2 * MAX_HEAD_BYTES:
            self._refuse(431)
        if version not in ("1.0", "1.1"):
            self._refuse(505)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1") or not target.isascii():
            self._refuse(400)
        method = parser.get_method()
        if parser.should_upgrade() and upgrade in self.protocols and self._can_upgrade(method, upgrade):
            self._upgrade(upgrade, method, version)
            return
        self.incoming = self.take(
            self._scope(method, version), version == "1.1" and parser.should_keep_alive()
        )
        self.expecting = self.incoming if waits and version == "1.1" else None

    def _upgrade(self, protocol: bytes, method: bytes, version: str) -> None:
        self.incoming = None
        if protocol == b"h2c":
            self.upgrade_head, self.upgrade_scope = b"", self._scope(method, version)
            return
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._target, version.encode())]
        lines += [b"%b: %b\r\n" % header for header in self._headers if header[0] != WS_EXTENSIONS]
        self.upgrade_head = b"".join(lines) + b"\r\n"

    def _scope(self, method: bytes, version: str) -> Scope:
        path, _, query = self._target.partition(b"?")
        peer = self.peer
        return {
            "type": "http",
            "http_version": version,
            "asgi": ASGI,
            "method": method.decode(),
            "scheme": peer.scheme,
            "path": unquote(path.decode()) if b"%" in path else path.decode(),
            "raw_path": path,
            "query_string": query,
            "root_path": peer.root_path,
            "headers": self._headers,
            "client": peer.client,
            "server": peer.server,
            "extensions": {},
        }

    def on_body(self, piece: bytes) -> None:
        """Called by the parser for each piece of a body."""
        self._has_advanced = True
        self.expecting = None
        if self.incoming is not None:
            self.incoming.feed(piece)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a body."""
        self._has_advanced = True
        self.expecting = None
        if self.incoming is not None:
            self.incoming.feed_end()

    def _can_upgrade(self, method: bytes, upgrade: bytes) -> bool:
        """WebSockets begin with a GET, and HTTP/2 with a request that has no body."""
        if upgrade == b"websocket":
            return method == b"GET"
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    def _refuse(self, status: int) -> None:
        self._status = status
        raise BadRequest(status)
