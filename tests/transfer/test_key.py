"""The key: where it is read, and what the header of a half says and proves."""

from pathlib import Path

import pytest

from runtime.errors import Forbidden, InvalidRequest, StartError
from runtime.messages.transfer import ROOMS, Transfer
from runtime.transfer.key import SERVERS_KEY, check_proof, header_value, parse_header, parse_source

KEY = b"0123456789abcdef"


@pytest.mark.parametrize("transfer", [Transfer(0), Transfer(ROOMS - 1, "host:1"), Transfer(7, "[::1]:8998")])
def test_a_header_comes_back(transfer: Transfer) -> None:
    found = parse_header(header_value(KEY, transfer))
    assert (found.room, found.source) == (transfer.room, transfer.source)
    check_proof(KEY, found)
    for other in (Transfer(transfer.room + 1, transfer.source), Transfer(transfer.room, "elsewhere:1")):
        with pytest.raises(Forbidden, match="router with the key"):
            check_proof(KEY, Transfer(other.room, other.source, found.proof))
    with pytest.raises(Forbidden):
        check_proof(KEY[::-1], found)


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "1 -", "x - " + "0" * 64, "-1 - " + "0" * 64, f"{ROOMS} - " + "0" * 64, "1 - " + "0" * 62),
        *("1 - " + "g" * 64, "1 host " + "0" * 64, "1 host:0 " + "0" * 64, "1  - " + "0" * 64),
        *("1 ::1:80 " + "0" * 64, "1 " + "h" * 600 + ":1 " + "0" * 64, "\u0661 - " + "0" * 64),
    ],
)
def test_anything_else_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-disaggregation"):
        parse_header(value)


def test_sources() -> None:
    assert parse_source("10.0.0.1:80") == ("10.0.0.1", 80) and parse_source("[::1]:80") == ("::1", 80)
    assert [parse_source(text) for text in ("a", "a:", ":1", "a:65536", "a:-1", "::1:1", "[a]b:1:x")] == [
        None
    ] * 7


def test_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    assert (
        SERVERS_KEY.read(str(file), {}) == SERVERS_KEY.read(None, {SERVERS_KEY.variable: KEY.decode()}) == KEY
    )
    with pytest.raises(StartError, match="openssl rand"):
        SERVERS_KEY.read(None, {})
    with pytest.raises(StartError, match="less than 16"):
        SERVERS_KEY.read(None, {SERVERS_KEY.variable: "short"})
    with pytest.raises(StartError, match="can't be read"):
        SERVERS_KEY.read(str(tmp_path / "none"), {})
