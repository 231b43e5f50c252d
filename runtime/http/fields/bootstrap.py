"""SGLang's fields of requests of which two servers compute a half each: `bootstrap_host`, `bootstrap_port`
and `bootstrap_room`, as its router writes them into both. They count only with the key of servers and router
as bearer token (transfer/halves.py): else a client could make a server connect to an address of its choice.
"""

from typing import Annotated as A
from typing import Protocol

from msgspec import Meta

from runtime.errors import InvalidRequest
from runtime.messages.transfer import ROOMS, Transfer
from runtime.transfer.key import parse_source

BootstrapHost = A[str, Meta(max_length=253)]
BootstrapPort = A[int, Meta(ge=1, le=65535)]
BootstrapRoom = A[int, Meta(ge=0, le=ROOMS - 1)]
DEFAULT_PORT = 8998  # as --disaggregation-bootstrap-port


class Bootstrapped(Protocol):
    """A body with these fields."""

    bootstrap_host: str | None
    bootstrap_port: int | None
    bootstrap_room: int | None


def transfer_of(body: Bootstrapped, num_prompts: int = 1) -> Transfer | None:
    """The half that the body names; None: none. Its bearer token is still to be added and checked. Raises
    InvalidRequest where fields are missing, and for several prompts."""
    if body.bootstrap_room is None and not body.bootstrap_host:
        return None
    if body.bootstrap_room is None:
        raise InvalidRequest("bootstrap_host goes with a bootstrap_room; add it", param="bootstrap_room")
    if num_prompts > 1:
        raise InvalidRequest(
            "bootstrap_room is for one prompt at a time; send a request for each", param="bootstrap_room"
        )
    host, port = body.bootstrap_host or "", body.bootstrap_port or DEFAULT_PORT
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    source = f"{host}:{port}"
    if parse_source(source) is None:
        raise InvalidRequest(
            f"bootstrap_host {host!r} is no name or address of a server; correct it", param="bootstrap_host"
        )
    return Transfer(body.bootstrap_room, source, bearer=b"")
