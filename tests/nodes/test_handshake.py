"""Both sides of the handshake, and what no other side can do."""

import pytest

from runtime.errors import LinkError
from runtime.nodes.handshake import MAGIC, NONCE_BYTES, REFUSAL, ClientHandshake, ServerHandshake

SECRET = b"s" * 32


def shake(server: ServerHandshake, client: ClientHandshake) -> bytes:
    """-> the last bytes, from the server"""
    hello = client.receive(bytearray(server.open()))
    answer = server.receive(bytearray(hello))
    client.receive(bytearray(answer))
    return answer


def test_both_sides_get_the_same_keys_one_for_each_direction() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    shake(server, client)
    assert server.keys is not None and client.keys is not None
    assert server.keys.send == client.keys.receive != server.keys.receive == client.keys.send


def test_keys_are_new_for_each_connection() -> None:
    found = set()
    for _ in range(3):
        server = ServerHandshake(SECRET)
        shake(server, ClientHandshake(SECRET))
        assert server.keys is not None
        found |= set(server.keys)
    assert len(found) == 6


def test_bytes_may_come_one_by_one() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    pending = server.open()
    for sides in ((client, server), (server, client), (client, server)):
        buffer, answer = bytearray(), b""
        for at in range(len(pending)):
            buffer += pending[at : at + 1]
            answer += sides[0].receive(buffer)
        pending = answer
    assert server.keys is not None and client.keys is not None and not buffer


def test_another_secret_is_refused_by_both() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(b"t" * 32)
    with pytest.raises(LinkError, match="its secret is another one"):
        shake(server, client)
    assert server.keys is None and client.keys is None
    assert server.receive(bytearray(MAGIC + bytes(64))) == REFUSAL


def test_a_node_0_with_another_secret_is_noticed() -> None:
    client = ClientHandshake(SECRET)
    client.receive(bytearray(ServerHandshake(SECRET).open()))
    with pytest.raises(LinkError):
        client.receive(bytearray(b"x" * 32))


def test_a_recorded_handshake_opens_nothing() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    recorded = client.receive(bytearray(server.open()))
    again = ServerHandshake(SECRET)
    assert again.receive(bytearray(recorded)) == REFUSAL and again.keys is None


def test_a_proof_sent_back_to_its_maker_opens_nothing() -> None:
    """Node 0 as its own peer: the nonce and the proof that it gets are those that another connection made."""
    first, second = ServerHandshake(SECRET), ServerHandshake(SECRET)
    nonce = second.open()[len(MAGIC) :]
    answer = first.receive(bytearray(MAGIC + nonce + bytes(32)))
    assert answer == REFUSAL
    assert second.receive(bytearray(MAGIC + first.open()[len(MAGIC) :] + answer)) == REFUSAL


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", MAGIC[:-1] + b"\x02"])
def test_other_protocols_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(LinkError, match="does not speak the protocol"):
        ServerHandshake(SECRET).receive(bytearray(data))
    with pytest.raises(LinkError, match="does not speak the protocol"):
        ClientHandshake(SECRET).receive(bytearray(data))


def test_what_follows_the_handshake_stays() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    hello = client.receive(bytearray(server.open()))
    assert len(hello) == len(MAGIC) + NONCE_BYTES + 32
    buffer = bytearray(hello + b"more")
    server.receive(buffer)
    assert buffer == b"more"
