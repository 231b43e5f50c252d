"""The `Host` of a request: by which name the client reached the server.

A page of any site can have its own name resolve to 127.0.0.1 (DNS rebinding) and then read, as pages of "its
own" origin, what a server of this machine answers. Such requests carry the page's name. So a server that
trusts all of its machine answers under its own names only.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

from runtime.errors import Forbidden


def authority(host: str, port: int) -> str:
    """HOST:PORT as URLs have it: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AllowedHosts:
    """The names under which a server answers; "*" among them: any."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are host names without ports; case does not matter."""
        self._names = frozenset(name.lower().strip("[]") for name in names)
        self.allows_any = "*" in self._names
        self._is_allowed = lru_cache(maxsize=64)(self._look_up)

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Returns if a request with these headers is addressed to this server. Raises Forbidden."""
        if self.allows_any:
            return
        for name, value in headers:
            if name == b"host" and not self._is_allowed(value):
                raise Forbidden(
                    f"this server is not addressed as {value[:80].decode('latin-1')!r}; reach it under its "
                    "own name, or start it with --allowed-hosts and the names that it has"
                )

    def _look_up(self, host: bytes) -> bool:
        """Addresses are always allowed: to rebind one, an attacker would need a name."""
        name = host_name(host.decode("latin-1"))
        if name in self._names:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """The name or address in a Host header, without port and brackets, in lower case."""
    if host.startswith("[") and "]" in host:
        return host[1:].partition("]")[0].partition("%")[0].lower()
    return host.partition(":")[0].removesuffix(".").lower()


ANY_HOST = AllowedHosts(("*",))
