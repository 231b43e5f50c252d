"""A stub of the hub's HTTP API with one repository: what huggingface_hub asks for to list and fetch files."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub:
    """A repository `org/tiny` with the files of a folder. What each file cost is counted."""

    def __init__(self, folder: Path, *, token: str | None = None) -> None:
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.token = token
        self.is_gated = False
        self.served: Counter[str] = Counter()  # bytes sent of each file
        self.cuts: dict[str, int] = {}  # name -> a transfer ends after so many bytes, once
        self.stalls: dict[str, int] = {}  # name -> a transfer sends so many bytes, and no more
        self.has_stalled, self.ended = threading.Event(), threading.Event()
        self.damaged: dict[str, int] = {}  # name -> how many transfers have a wrong byte
        self.url = ""

    def info(self) -> dict[str, object]:
        """The answer of /api/models/org/tiny."""
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                **({"lfs": self._lfs(data)} if self._is_large(name) else {}),
            }
            for name, data in self.files.items()
        ]
        return {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings, "tags": []}

    def etag(self, name: str) -> str:
        """The SHA-256 of a large file, git's hash of a small one."""
        data = self.files[name]
        if self._is_large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @staticmethod
    def _is_large(name: str) -> bool:
        return name.endswith((".safetensors", ".gguf"))

    @staticmethod
    def _lfs(data: bytes) -> dict[str, object]:
        return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}


class Handler(BaseHTTPRequestHandler):
    """Answers for the `hub` of its class."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(sends_body=False)

    def do_GET(self) -> None:
        self._answer(sends_body=True)

    def _answer(self, sends_body: bool) -> None:
        path = self.path.partition("?")[0]
        is_known = self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if not is_known or not path.removeprefix("/api/models").startswith("/org/tiny"):
            self._send(401, {"X-Error-Code": "RepoNotFound"}, b"{}", sends_body)
        elif self.hub.is_gated:
            self._send(403, {"X-Error-Code": "GatedRepo"}, b"{}", sends_body)
        elif path.startswith("/api/models/"):
            revision = path.partition("/revision/")[2]
            if revision not in ("", "main", COMMIT):
                self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", sends_body)
            else:
                self._send(
                    200,
                    {"Content-Type": "application/json"},
                    json.dumps(self.hub.info()).encode(),
                    sends_body,
                )
        else:
            self._file(path.partition("/resolve/")[2].partition("/")[2], sends_body)

    def _file(self, name: str, sends_body: bool) -> None:
        if name not in self.hub.files:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", sends_body)
            return
        data, begin = self.hub.files[name], 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        if sends_body and self.hub.damaged.get(name, 0) > 0:
            self.hub.damaged[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {
            "ETag": f'"{self.hub.etag(name)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        body = data[begin:]
        cut = self.hub.cuts.pop(name, None) if sends_body else None
        if sends_body:
            self.hub.served[name] += len(body) if cut is None else cut
        stall = self.hub.stalls.get(name) if sends_body else None
        self._send(206 if begin else 200, headers, body, sends_body, stall if cut is None else cut)
        if stall is not None:
            self.hub.has_stalled.set()
            self.hub.ended.wait()

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, sends_body: bool, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if sends_body:
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Writes no log."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves the stub on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
