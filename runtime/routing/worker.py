"""A server behind the router (SGLang's router: worker): its address, its load and whether it lives."""

from collections import deque
from urllib.parse import urlsplit

from runtime.errors import InvalidRequest
from runtime.routing.upstream import UpstreamConnection

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_IDLE = 64  # connections that are kept open to one server


class Worker:
    """One server. `load`: requests that this router has at it. It takes requests while `is_healthy`: from
    the first health check that succeeds."""

    def __init__(self, url: str) -> None:
        """Raises InvalidRequest for what is no http(s) URL."""
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            raise InvalidRequest(f"{url} is no URL; write http://HOST:PORT", param="url") from None
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.username or parts.query:
            raise InvalidRequest(f"{url} is no URL of a server; write http://HOST:PORT", param="url")
        if not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise InvalidRequest(f"{url!r} has characters that a URL can't have", param="url")
        self.host = parts.hostname
        self.port = port or DEFAULT_PORTS[parts.scheme]
        self.has_tls = parts.scheme == "https"
        self.authority = parts.netloc
        self.root_path = parts.path
        self.load = 0
        self.is_healthy = False
        self.failures = 0  # of health checks and requests, in a row
        self.next_check_s = 0.0  # of the event loop's clock
        self.idle: deque[UpstreamConnection] = deque()

    def report_failure(self, threshold: int) -> None:
        """A health check failed, or a request before its answer began; `threshold` of them in a row eject the
        server."""
        self.failures += 1
        if self.failures >= threshold:
            self.eject()

    def report_success(self) -> None:
        """A health check succeeded: the server takes requests."""
        self.failures = 0
        self.is_healthy = True

    def eject(self) -> None:
        """The server gets no requests until a health check succeeds."""
        self.is_healthy = False
        self.close_idle()

    def keep(self, connection: UpstreamConnection) -> None:
        """Takes a connection back whose answer was read whole."""
        connection.release()
        if self.is_healthy and len(self.idle) < MAX_IDLE:
            self.idle.append(connection)
        else:
            connection.close()

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        while self.idle:
            self.idle.pop().close()
