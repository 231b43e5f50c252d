"""`runtime chat`: a conversation in the terminal, streamed from a server's /v1/chat/completions.

Without --url it talks to the server at the default address if one answers, else it starts one of its own for
the conversation. Lines come from standard input, so a script can pipe them in. /system TEXT, /reset and /exit
are commands.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import SplitResult, urlsplit

from runtime.errors import StartError

DEFAULT_URL = "http://127.0.0.1:30000"
START_TIMEOUT_S = 600.0  # a large model takes its time to load
COMMANDS = "/system TEXT sets the system message, /reset begins anew, /exit leaves"


class Chat:
    """A conversation with one server: the messages so far, and sending the next one."""

    def __init__(self, url: str, api_key: str | None = None, **parameters: Any) -> None:
        self.url = _split(url)
        self.headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.parameters = {name: value for name, value in parameters.items() if value is not None}
        self.messages: list[dict[str, str]] = []

    def reset(self, system: str | None = None) -> None:
        """Begins anew, keeping the system message unless `system` replaces it."""
        kept = [message for message in self.messages[:1] if message["role"] == "system"]
        self.messages = [{"role": "system", "content": system}] if system is not None else kept

    def say(self, text: str) -> Iterator[str]:
        """Sends one line and yields the answer as it comes. A turn that fails is taken back. Raises
        StartError with the server's reason."""
        self.messages.append({"role": "user", "content": text})
        deltas: list[str] = []
        try:
            for delta in self._stream():
                deltas.append(delta)
                yield delta
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(deltas)})

    def _stream(self) -> Iterator[str]:
        body = json.dumps({"messages": self.messages, "stream": True, **self.parameters})
        connection = _connect(self.url, timeout=START_TIMEOUT_S)
        try:
            connection.request("POST", f"{self.url.path.rstrip('/')}/v1/chat/completions", body, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise StartError(f"the server refused with {response.status}: {_reason(response.read())}")
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield _delta(json.loads(data))
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise StartError(f"the connection to {self.url.geturl()} broke: {error}") from None
        finally:
            connection.close()


def run(argv: Sequence[str]) -> int:
    """Talks until /exit or the end of input. Raises StartError when there is no server and none can be
    started."""
    arguments, serve_arguments = _parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with ExitStack() as stack:
        url = arguments.url or DEFAULT_URL
        if not _is_ready(url):
            if arguments.url:
                raise StartError(
                    f"no server answers at {url}; start one with `runtime serve`, or leave --url out"
                )
            url = stack.enter_context(_own_server(serve_arguments))
        elif serve_arguments:
            raise StartError(
                f"{serve_arguments[0]} is for a server that chat starts itself, but one runs at {url} already"
            )
        chat = Chat(
            url,
            os.environ.get("RUNTIME_API_KEY"),
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
        )
        if arguments.system:
            chat.reset(arguments.system)
        converse(chat, sys.stdin, sys.stdout)
    return 0


def _leave(number: int, frame: object) -> None:
    """A signal unwinds the stack, so that a server of our own is stopped."""
    sys.exit(128 + number)


def converse(chat: Chat, lines: TextIO, out: TextIO) -> None:
    """Reads lines, obeys commands, prints answers. Prompts are shown to people only."""
    is_person = lines.isatty()
    if is_person:
        print(COMMANDS, file=out)
    while True:
        if is_person:
            print("> ", end="", file=out, flush=True)
        line = lines.readline()
        if not line:
            return
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return
        if command in ("/reset", "/system"):
            chat.reset(rest.strip() if command == "/system" else None)
        elif command.startswith("/"):
            print(f"{command} is no command: {COMMANDS}", file=out)
        elif line.strip():
            _answer(chat, line.strip(), out, is_person)


def _answer(chat: Chat, text: str, out: TextIO, is_person: bool) -> None:
    """A person goes on after a failed or interrupted turn; a script stops."""
    try:
        for delta in chat.say(text):
            print(delta, end="", file=out, flush=True)
        print(file=out, flush=True)
    except (StartError, KeyboardInterrupt) as error:
        if not is_person:
            raise
        print(f"\n[{error or 'interrupted'}]", file=out, flush=True)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="runtime chat",
        allow_abbrev=False,
        description=f"Chat in the terminal. {COMMANDS}.",
        epilog="Further options go to `runtime serve` when chat starts a server: --model-path DIR, ... "
        "An API key is read from RUNTIME_API_KEY.",
    )
    parser.add_argument(
        "--url", help=f"server to talk to (default: {DEFAULT_URL} if it answers, else a server of its own)"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    parser.add_argument(
        "--max-tokens", type=int, help="longest answer in tokens (default: up to the context length)"
    )
    return parser.parse_known_args(argv)


@contextmanager
def _own_server(serve_arguments: Sequence[str]) -> Iterator[str]:
    """A server on a free port for as long as the conversation lasts. It takes the port
    itself and logs it, so that no other process can take it in between."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        command = [
            sys.executable,
            "-m",
            "runtime",
            "serve",
            *serve_arguments,
            "--port",
            "0",
            "--log-format",
            "json",
            "--log-level",
            "info",
        ]
        # A process group of its own: Ctrl-C ends an answer, not the server.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            print("starting a server ...", file=sys.stderr)
            yield _await_ready(server, Path(f"/proc/self/fd/{log.fileno()}"))
        finally:
            server.terminate()
            try:
                server.wait(timeout=40)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server that answers. Raises StartError with its last words when it ends first."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        if (url := _logged_url(text)) is not None and _is_ready(url):
            return url
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise StartError(
            f"the server did not start: {words[-1] if words else f'exit code {server.returncode}'}"
        )
    raise StartError(f"the server did not answer within {START_TIMEOUT_S:.0f} s")


def _logged_url(text: str) -> str | None:
    """The `url` of the server's line that says where it listens."""
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}") and "url" in (event := json.loads(line)):
            return str(event["url"])
    return None


def _is_ready(url: str) -> bool:
    target = _split(url)
    connection = _connect(target, timeout=5)
    try:
        connection.request("GET", f"{target.path.rstrip('/')}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _split(url: str) -> SplitResult:
    target = urlsplit(url)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise StartError(f"--url {url} is no address; write http://HOST:PORT")
    return target


def _connect(target: SplitResult, timeout: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    return kind(target.hostname or "", target.port, timeout=timeout)


def _delta(event: dict[str, Any]) -> str:
    """The text of one chunk; reasoning counts as text. Raises StartError for an error event."""
    if "error" in event:
        raise StartError(f"the server ended the answer: {event['error'].get('message', event['error'])}")
    fields = event["choices"][0]["delta"] if event.get("choices") else {}
    return (fields.get("reasoning_content") or "") + (fields.get("content") or "")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
