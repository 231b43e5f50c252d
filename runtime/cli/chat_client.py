"""A conversation with a server, over its /v1/chat/completions."""

import http.client
import json
from collections.abc import Iterator, Mapping
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from runtime.errors import StartError

ANSWER_TIMEOUT_S = 600.0  # a queue before us takes its time
PROBE_TIMEOUT_S = 5.0
STARTING = ("loading", "recovering")


class Piece(Struct, frozen=True):
    """A piece of an answer as it comes."""

    text: str
    is_reasoning: bool = False


class Reached(Struct, frozen=True):
    """What a server says about itself; one that does not answer says nothing."""

    is_ready: bool = False
    is_starting: bool = False  # it will be ready
    detail: str = ""  # what it is doing


class Chat:
    """A conversation with one server: the messages so far, and sending the next one."""

    def __init__(self, url: str, api_key: str | None = None, **parameters: object) -> None:
        """`parameters`: fields of each request; those that are None stay out. Raises StartError for a `url`
        that is no address."""
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

    def take_back(self) -> str | None:
        """Removes the last turn and returns what was said in it; None: there was none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def say(self, text: str) -> Iterator[Piece]:
        """Sends one message and yields the answer as it comes. A turn that fails is taken back; of one that
        is interrupted stays what came. Raises StartError with the server's reason."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += "" if piece.is_reasoning else piece.text
                yield piece
        except BaseException as error:
            if answer and not isinstance(error, StartError):  # a person has stopped it
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def model(self) -> str:
        """The name of the model that the server answers with; empty if it does not say."""
        try:
            status, body = self._get("/v1/models")
            return str(json.loads(body)["data"][0]["id"]) if status == 200 else ""
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError):
            return ""

    def health(self) -> Reached:
        """What the server says about itself."""
        try:
            status, body = self._get("/health")
            answer = json.loads(body) if body else {}
            state, detail = str(answer.get("state", "")), str(answer.get("detail", ""))
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return Reached()
        return Reached(is_ready=status == 200, is_starting=state in STARTING, detail=detail or state)

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = _connect(self.url, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", f"{self.url.path.rstrip('/')}{path}", headers=self.headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stream(self) -> Iterator[Piece]:
        body = json.dumps({"messages": self.messages, "stream": True, **self.parameters})
        connection = _connect(self.url, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("POST", f"{self.url.path.rstrip('/')}/v1/chat/completions", body, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise StartError(f"the server refused with {response.status}: {_reason(response.read())}")
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    yield from _pieces(json.loads(data))
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise StartError(f"the connection to {self.url.geturl()} broke: {error}") from None
        finally:
            connection.close()


def _pieces(event: Mapping[str, object]) -> Iterator[Piece]:
    """The texts of one chunk. Raises StartError for an error event."""
    if "error" in event:
        raise StartError(f"the server ended the answer: {event['error'].get('message', event['error'])}")
    fields = event["choices"][0]["delta"] if event.get("choices") else {}
    if reasoning := fields.get("reasoning_content"):
        yield Piece(reasoning, is_reasoning=True)
    if content := fields.get("content"):
        yield Piece(content)


def _split(url: str) -> SplitResult:
    target = urlsplit(url)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise StartError(f"--url {url} is no address; write http://HOST:PORT")
    return target


def _connect(target: SplitResult, timeout: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    return kind(target.hostname or "", target.port, timeout=timeout)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
