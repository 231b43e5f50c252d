"""The key that a router and its servers share: --disaggregation-key-file, or the environment variable
RUNTIME_DISAGGREGATION_KEY.

It opens two things. Servers prove it to each other before pages move (nodes/handshake.py). And a request has
a half for this server only if its header says so with a proof:

    x-disaggregation: ROOM SOURCE PROOF      SOURCE: HOST:PORT, or - for the server that computes the prompt

PROOF is HMAC-SHA256 (RFC 2104) with the key over room and source, in hexadecimal. A header that was copied
from the network can be sent again, and leads to the same room alone; the key itself is never sent. Without
this a client could make a server connect to an address of the client's choice.

SGLang's router writes room and source into the body instead (http/fields/bootstrap.py). Such fields count
where the key itself comes as bearer token, as that router sends the key of its workers.
"""

import hmac

from runtime.errors import Forbidden, InvalidRequest
from runtime.messages.transfer import ROOMS, Transfer
from runtime.nodes.secret import SharedSecret

HEADER = "x-disaggregation"
OPTION = "--disaggregation-key-file"
SERVERS_KEY = SharedSecret(
    noun="key",
    option=OPTION,
    variable="RUNTIME_DISAGGREGATION_KEY",
    missing="disaggregation needs a key that the router and its servers share",
    holders="the router and all its servers",
)
MAX_HEADER_CHARS = 512
ROOM_FIELD = "bootstrap_room"  # of bodies, in place of the header
HERE = "-"  # source of a request whose prompt the server itself computes


def link_key(key: bytes) -> bytes:
    """The secret by which two servers know each other."""
    return hmac.digest(key, b"pages", "sha256")


def header_value(key: bytes, transfer: Transfer) -> str:
    """The header of a request's half."""
    return f"{transfer.room} {transfer.source or HERE} {_proof(key, transfer).hex()}"


def parse_header(value: str) -> Transfer:
    """The half that a header names; its proof is still to be checked. Raises InvalidRequest."""
    words = value.split(" ") if len(value) <= MAX_HEADER_CHARS else []
    if len(words) == 3 and words[0].isascii() and words[0].isdigit() and len(words[0]) < 20:
        room, source = int(words[0]), words[1]
        try:
            proof = bytes.fromhex(words[2])
        except ValueError:
            proof = b""
        if room < ROOMS and len(proof) == 32 and (source == HERE or parse_source(source) is not None):
            return Transfer(room, "" if source == HERE else source, proof)
    raise InvalidRequest(
        f"the header {HEADER} must be a room, HOST:PORT or -, and a proof; leave it out, "
        "as it is for `runtime route --pd-disaggregation`",
        param=HEADER,
    )


def parse_source(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None: it is none."""
    host, colon, port = text.rpartition(":")
    is_numbered = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    if not (colon and host and is_numbered) or (":" in host) != host.startswith("["):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_proof(key: bytes, transfer: Transfer) -> None:
    """Raises Forbidden unless the request comes from a router with the key."""
    if not hmac.compare_digest(transfer.proof, _proof(key, transfer)):
        raise Forbidden(
            f"the header {HEADER} is for a router with the key of this server ({OPTION}); leave it out, or "
            "give the router the same key",
            param=HEADER,
        )


def check_bearer(key: bytes, token: bytes) -> None:
    """Raises Forbidden unless `token` is the key."""
    if not hmac.compare_digest(token, key):
        raise Forbidden(
            f"{ROOM_FIELD} is for a router that sends the key of this server ({OPTION}) as `authorization: "
            "Bearer KEY`; leave it out, or give the router the same key",
            param=ROOM_FIELD,
        )


def _proof(key: bytes, transfer: Transfer) -> bytes:
    return hmac.digest(key, f"room\0{transfer.room}\0{transfer.source}".encode(), "sha256")
