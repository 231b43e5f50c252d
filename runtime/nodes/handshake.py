"""How two nodes prove to each other that they have the same secret, and agree on keys for what follows.

    node 0 ──► node   magic, nonce of node 0
    node ──► node 0   magic, nonce of the node, proof of the node
    node 0 ──► node   proof of node 0; zeros: the node's proof is wrong

A proof is HMAC-SHA256 (RFC 2104) with the secret over a label and both nonces. The labels differ, so a proof
cannot be sent back to its maker, and the nonces are new for each connection, so none can be sent again. The
keys of the two directions are made in the same way, with labels of their own. The secret itself is never
sent.

Everything here is of a fixed size, and nothing is decoded before the other side is known.
"""

import hmac
import os
from typing import NamedTuple, Protocol

from runtime.errors import LinkError

MAGIC = b"runtime\x01"  # the last byte is the version of this protocol
NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
OTHER_SECRET = "its secret is another one"


class Keys(NamedTuple):
    """Keys of HMAC-SHA256 for the records of each direction."""

    send: bytes
    receive: bytes


class Handshake(Protocol):
    """One side of a handshake."""

    keys: Keys | None  # when it has succeeded

    def open(self) -> bytes:
        """What this side sends first."""
        ...

    def receive(self, buffer: bytearray) -> bytes:
        """Takes what has come so far from the beginning of `buffer`. -> what to send. Raises LinkError."""
        ...


class ServerHandshake:
    """The side of node 0."""

    def __init__(self, secret: bytes) -> None:
        self.keys: Keys | None = None
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)

    def open(self) -> bytes:
        """Magic and nonce."""
        return MAGIC + self._nonce

    def receive(self, buffer: bytearray) -> bytes:
        """Checks the node's proof. -> that of node 0; zeros for a wrong one, and `keys` stays None. Raises
        LinkError for bytes of another protocol."""
        _check_magic(buffer)
        size = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
        if len(buffer) < size:
            return b""
        nonces = self._nonce + buffer[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        proof = bytes(buffer[size - PROOF_BYTES : size])
        del buffer[:size]
        if not hmac.compare_digest(proof, _derive(self._secret, b"node", nonces)):
            return REFUSAL
        self.keys = Keys(
            _derive(self._secret, b"from node 0", nonces), _derive(self._secret, b"from node", nonces)
        )
        return _derive(self._secret, b"node 0", nonces)


class ClientHandshake:
    """The side of another node."""

    def __init__(self, secret: bytes) -> None:
        self.keys: Keys | None = None
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._nonces = b""  # both, when that of node 0 is known

    def open(self) -> bytes:
        """Nothing: node 0 begins."""
        return b""

    def receive(self, buffer: bytearray) -> bytes:
        """-> nonce and proof of this node, when the nonce of node 0 has come. Raises LinkError for bytes of
        another protocol, and for a wrong proof."""
        if not self._nonces:
            _check_magic(buffer)
            size = len(MAGIC) + NONCE_BYTES
            if len(buffer) < size:
                return b""
            self._nonces = bytes(buffer[len(MAGIC) : size]) + self._nonce
            del buffer[:size]
            return MAGIC + self._nonce + _derive(self._secret, b"node", self._nonces)
        if len(buffer) < PROOF_BYTES:
            return b""
        proof = bytes(buffer[:PROOF_BYTES])
        del buffer[:PROOF_BYTES]
        if not hmac.compare_digest(proof, _derive(self._secret, b"node 0", self._nonces)):
            raise LinkError(OTHER_SECRET)
        self.keys = Keys(
            _derive(self._secret, b"from node", self._nonces),
            _derive(self._secret, b"from node 0", self._nonces),
        )
        return b""


def _derive(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + nonces, "sha256")


def _check_magic(buffer: bytearray) -> None:
    if buffer[: len(MAGIC)] != MAGIC[: len(buffer)]:
        raise LinkError("it does not speak the protocol of this version's nodes")
