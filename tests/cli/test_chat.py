"""`runtime chat` against a small scripted server, on a free port."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import chat, main
from runtime.cli.chat_client import Chat
from runtime.cli.chat_server import WaitingLine, await_started, logged_url
from runtime.cli.line_input import EditedInput, PipedInput, history_file
from runtime.errors import StartError


class Scripted(BaseHTTPRequestHandler):
    """Answers with what it was asked, a character a chunk; `fail` is refused and `broken` ends with an error
    event."""

    seen: list[dict[str, Any]] = []
    starting: list[str] = []  # details of a server that loads, one for each time that it is asked

    def do_GET(self) -> None:
        if self.path == "/health" and Scripted.starting:
            self._reply(503, json.dumps({"state": "loading", "detail": Scripted.starting.pop(0)}).encode())
            return
        bodies = {"/health": b"{}", "/v1/models": b'{"data": [{"id": "tiny"}]}'}
        self._reply(200 if self.path in bodies else 404, bodies.get(self.path, b"{}"))

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
        if text == "think":
            events.insert(0, {"choices": [{"delta": {"reasoning_content": "hm"}}]})
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
    chat.converse(Chat(url, **parameters), PipedInput(io.StringIO(lines)), out)
    return out.getvalue()


def test_answers_are_printed_and_remembered(url: str) -> None:
    assert talk(url, "abc\n\nxyz\n", temperature=0.0, max_tokens=None) == "cba\nzyx\n"
    assert [m["content"] for m in Scripted.seen[1]["messages"]] == ["abc", "cba", "xyz"]
    assert Scripted.seen[0]["temperature"] == 0.0 and "max_tokens" not in Scripted.seen[0]


def test_commands(url: str) -> None:
    assert talk(url, "/system be brief\none\n/reset\ntwo\n/exit\nthree\n") == "eno\nowt\n"
    assert [m["content"] for m in Scripted.seen[-1]["messages"]] == ["be brief", "two"]
    assert "no command" in talk(url, "/nonsense\n")
    assert "/retry" in talk(url, "/help\n")


def test_the_last_answer_is_made_again(url: str) -> None:
    assert talk(url, "/retry\nabc\n/retry\n") == "there is nothing to answer again\ncba\ncba\n"
    assert [m["content"] for m in Scripted.seen[-1]["messages"]] == ["abc"]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Always."""
        return True


def test_a_server_that_loads_is_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, it passed for one that does not answer."""
    Scripted.starting = ["loading weights: 1.0 of 2.0 GB", "loading weights: 2.0 of 2.0 GB", "profile run"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert chat.run(["--url", url]) == 0
    assert capsys.readouterr().out == "cba\n" and not Scripted.starting
    assert await_started(url, None).is_ready and not await_started("http://127.0.0.1:9", None).is_ready


@pytest.mark.parametrize(
    ("out", "shown"),
    [(Terminal(), "\r\x1b[Kloading\r\x1b[Kprofile run\r\x1b[K"), (io.StringIO(), "loading\nprofile run\n")],
    ids=["terminal", "file"],
)
def test_what_it_does_meanwhile_is_shown(out: io.StringIO, shown: str) -> None:
    times = [0.0]
    line = WaitingLine(out, lambda: times[-1])
    for now_s, detail in ((1.0, "loading"), (6.0, "loading"), (7.0, "profile run"), (12.0, "profile run")):
        times.append(now_s)
        line.show(detail)
    line.end()
    assert out.getvalue() == shown


def test_a_key_goes_with_the_request(url: str) -> None:
    chat.converse(Chat(url, "secret"), PipedInput(io.StringIO("hi\n")), io.StringIO())
    assert Scripted.seen[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("line", "reason"), [("fail", "refused with 400: no such thing"), ("broken", "a rank died")]
)
def test_a_failed_turn_is_taken_back(url: str, line: str, reason: str) -> None:
    talker = Chat(url)
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
    assert logged_url(lines) == "http://127.0.0.1:5"
    assert logged_url("noise\n") is None


def test_reasoning_is_shown_and_not_sent_back(url: str) -> None:
    assert talk(url, "think\nabc\n") == "hmkniht\ncba\n"
    assert [m["content"] for m in Scripted.seen[-1]["messages"]] == ["think", "kniht", "abc"]


@pytest.mark.parametrize("is_thrown", [True, False])
def test_of_an_interrupted_answer_stays_what_came(url: str, is_thrown: bool) -> None:
    """Whether Ctrl-C comes while the next piece is awaited, or while the last one is printed."""
    talker = Chat(url)
    pieces = talker.say("abc")
    assert [next(pieces).text, next(pieces).text] == ["c", "b"]
    if is_thrown:
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    else:
        pieces.close()  # type: ignore[attr-defined]
    assert [m["content"] for m in talker.messages] == ["abc", "cb"]


class Person:
    """Someone at a terminal: lines, and Ctrl-C at the prompt."""

    is_person = True

    def __init__(self, *lines: str | None) -> None:
        self.lines = list(lines)

    def read(self) -> str | None:
        line = self.lines.pop(0)
        if line == "^C":
            raise KeyboardInterrupt
        return line


def test_a_person_meets_the_model_and_goes_on_after_errors(url: str) -> None:
    out = io.StringIO()
    chat.converse(Chat(url), Person("^C", "fail", "think", None), out)
    text = out.getvalue()
    assert text.startswith(f"tiny at {url}. /help lists the commands.")
    assert "[the server refused with 400: no such thing]" in text
    assert f"{chat.DIM}hm{chat.PLAIN}\nkniht" in text


def test_lines_are_edited_and_remembered(tmp_path: Path) -> None:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    history = history_file({"XDG_STATE_HOME": str(tmp_path)})
    assert history is not None and history.stat().st_mode & 0o777 == 0o600
    with create_pipe_input() as keys:
        lines = EditedInput(history, chat.COMMANDS, input=keys, output=DummyOutput())
        keys.send_text("helo\x1b[Dl\r")  # the cursor goes back by one
        assert lines.read() == "hello"
        keys.send_text("one\x1b\rtwo\r")  # Alt+Enter
        assert lines.read() == "one\ntwo"
        keys.send_text("\x1b[A\r")  # up
        assert lines.read() == "one\ntwo"
        keys.send_text("\x04")
        assert lines.read() is None
    assert "+hello" in history.read_text()


def test_a_home_that_cannot_be_written_has_no_history() -> None:
    assert history_file({"HOME": "/proc/nowhere"}) is None
