"""`runtime chat` against a small scripted server, on a free port."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runtime.cli import chat, main
from runtime.errors import StartError


class Scripted(BaseHTTPRequestHandler):
    """Answers with what it was asked, a character a chunk; `fail` is refused and `broken` ends with an error
    event."""

    seen: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Scripted.seen.append(body | {"authorization": self.headers.get("authorization")})
        text = body["messages"][-1]["content"]
        if text == "fail":
            self._reply(400, json.dumps({"error": {"message": "no such thing"}}).encode())
            return
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": character}}]} for character in text[::-1]
        ]
        if text == "broken":
            events.append({"error": {"message": "a rank died"}})
        lines = [b"data: " + json.dumps(event).encode() for event in [*events, {"choices": []}]] + [
            b"data: [DONE]"
        ]
        self._reply(200, b"\n\n".join(lines) + b"\n\n")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the test's output."""


@pytest.fixture
def url() -> Iterator[str]:
    Scripted.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def talk(url: str, lines: str, **parameters: Any) -> str:
    out = io.StringIO()
    chat.converse(chat.Chat(url, **parameters), io.StringIO(lines), out)
    return out.getvalue()


def test_answers_are_printed_and_remembered(url: str) -> None:
    assert talk(url, "abc\n\nxyz\n", temperature=0.0, max_tokens=None) == "cba\nzyx\n"
    assert [m["content"] for m in Scripted.seen[1]["messages"]] == ["abc", "cba", "xyz"]
    assert Scripted.seen[0]["temperature"] == 0.0 and "max_tokens" not in Scripted.seen[0]


def test_commands(url: str) -> None:
    assert talk(url, "/system be brief\none\n/reset\ntwo\n/exit\nthree\n") == "eno\nowt\n"
    assert [m["content"] for m in Scripted.seen[-1]["messages"]] == ["be brief", "two"]
    assert "no command" in talk(url, "/help\n")


def test_a_key_goes_with_the_request(url: str) -> None:
    chat.converse(chat.Chat(url, "secret"), io.StringIO("hi\n"), io.StringIO())
    assert Scripted.seen[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("line", "reason"), [("fail", "refused with 400: no such thing"), ("broken", "a rank died")]
)
def test_a_failed_turn_is_taken_back(url: str, line: str, reason: str) -> None:
    talker = chat.Chat(url)
    with pytest.raises(StartError, match=reason):
        list(talker.say(line))
    assert talker.messages == []


def test_the_command_with_piped_input(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setattr(chat.signal, "signal", lambda number, action: None)
    assert main(["chat", "--url", url, "--system", "s"]) == 0
    assert capsys.readouterr().out == "olleh\n"
    assert Scripted.seen[0]["messages"][0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("url", "reason"), [("http://127.0.0.1:9", "no server answers"), ("nonsense", "is no address")]
)
def test_no_server(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat.signal, "signal", lambda number, action: None)
    assert main(["chat", "--url", url]) == 2
    assert reason in capsys.readouterr().err


def test_the_servers_address_is_read_from_its_log() -> None:
    lines = 'noise\n{"event": "weights"}\n{"event": "listening", "url": "http://127.0.0.1:5"}\n{"half'
    assert chat._logged_url(lines) == "http://127.0.0.1:5"
    assert chat._logged_url("noise\n") is None
