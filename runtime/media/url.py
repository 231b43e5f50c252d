"""The URLs of media: what a client wrote, read once and strictly, so that what is checked is what is used."""

from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from msgspec import Struct

from runtime.errors import InvalidRequest

MAX_CHARS = 8192  # of a URL other than data:
PORTS = {"http": 80, "https": 443}


class Target(Struct, frozen=True):
    """Where an http or https URL leads. `host`: in lower case, a name or an address without brackets."""

    scheme: str
    host: str
    port: int
    path: str  # with the query

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; "": it has none."""
    head, colon, _ = url[:32].partition(":")
    return head.lower() if colon and head.isascii() and head.isalnum() else ""


def target_of(url: str, param: str) -> Target:
    """The target of an http or https URL. Raises InvalidRequest."""
    parts = _split(url, param)
    try:
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise InvalidRequest(f"{param}: the port of the URL is no port", param=param) from None
    if parts.scheme not in PORTS or not host:
        raise InvalidRequest(f"{param} must be a URL of http or https with a host", param=param)
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest(f"{param}: a user in a URL is not sent; leave it out", param=param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host.rstrip("."), PORTS[parts.scheme] if port is None else port, path)


def redirected(url: str, location: str, param: str) -> str:
    """The URL that a redirect from `url` leads to. Raises InvalidRequest."""
    if len(location) > MAX_CHARS:
        raise InvalidRequest(f"{param} leads to a URL of over {MAX_CHARS} characters", param=param)
    try:
        return urljoin(url, location)
    except ValueError:
        raise InvalidRequest(f"{param} leads to what is no URL", param=param) from None


def file_path(url: str, param: str) -> str:
    """The absolute path of a file: URL of this machine. Raises InvalidRequest."""
    parts = _split(url, param)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{param} must be file:// and an absolute path of the server", param=param)
    return path


def data_of(url: str, param: str) -> int:
    """Where the base64 of a data: URL begins (RFC 2397). Raises InvalidRequest."""
    head, comma, _ = url[:1024].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"{param}: a data URL must be data:TYPE;base64,DATA", param=param)
    return len(head) + 1


def _split(url: str, param: str) -> SplitResult:
    if len(url) > MAX_CHARS:
        raise InvalidRequest(f"{param} has over {MAX_CHARS} characters; a shorter URL is taken", param=param)
    # browsers and libraries read these differently
    if not url.isascii() or "\\" in url or any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url):
        raise InvalidRequest(f"{param}: write other than plain characters of the URL as %XX", param=param)
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"{param} is no URL: {error}", param=param) from None
