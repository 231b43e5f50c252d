"""--load-format remote_instance: a server's files copied from another server that serves them."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from runtime.errors import ModelError, OptionsError
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.settings import HttpSettings
from runtime.hub.child import download
from runtime.hub.download import fetch_config
from runtime.hub.seed import SeedServer
from runtime.hub.seed_files import seed_files
from runtime.hub.source import HubModel
from runtime.options.parse import from_argv
from runtime.options.resolve import plan_for
from tests.e2e.serving import serve
from tests.http.fake import FakeService
from tests.models.make import make_checkpoint

KEY = "the-admin-key"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_checkpoint("llama", tmp_path_factory.mktemp("seed") / "tiny")
    (found / "notes.txt").write_text("x")
    (found / "private.key").write_text("secret")
    return found


class Seed(ThreadingHTTPServer):
    """A stand-in for the server of the files, which can break off and send damaged bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends_after: int | None = None  # bytes of a file, and then the connection is cut
        self.damages = False
        self.offsets: list[int] = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Seed

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?offset=")
        self.send_response(200 if self.headers["authorization"] == f"Bearer {KEY}" else 401)
        self.end_headers()
        if path == "/model_files":
            listed = [
                {"name": one.name, "size": one.size, "changed_ns": one.changed_ns}
                for one in seed_files(self.server.folder).files
            ]
            self.wfile.write(json.dumps({"files": listed}).encode())
            return
        content, offset = (self.server.folder / path.removeprefix("/model_files/")).read_bytes(), int(query)
        self.server.offsets.append(offset)
        sent = (
            content[offset:] if self.server.ends_after is None else content[offset : self.server.ends_after]
        )
        if self.server.damages:
            sent = bytes(len(sent))
        self.wfile.write(sent + (sha256(content).digest() if self.server.ends_after is None else b""))


@contextmanager
def seed_of(folder: Path) -> Iterator[tuple[Seed, str]]:
    server = Seed(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def model_at(url: str, cache: Path, version: str | None = None) -> HubModel:
    return HubModel(repo=url, cache_dir=str(cache), hub="seed", revision=version)


def test_small_files_first_then_the_weights(folder: Path, tmp_path: Path) -> None:
    with seed_of(folder) as (_, url):
        local = fetch_config(model_at(url, tmp_path), KEY)
        assert (local / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        assert not (local / WEIGHTS).exists() and not (local / "private.key").exists()
        version = local.name.removeprefix("seed-")
        assert download(SeedServer(model_at(url, tmp_path, version), KEY), "weights") == local
        assert (local / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        with pytest.raises(ModelError, match="other files than when this start began"):
            SeedServer(model_at(url, tmp_path, "0" * 16), KEY).files()


def test_a_lost_seed_is_one_error_and_the_next_start_goes_on(folder: Path, tmp_path: Path) -> None:
    size = (folder / WEIGHTS).stat().st_size
    with seed_of(folder) as (server, url):
        source = SeedServer(model_at(url, tmp_path), KEY)
        source.files()
        server.ends_after = size // 2
        with pytest.raises(
            ModelError, match=rf"was lost while it sent {WEIGHTS} \({size // 2} of {size} bytes"
        ):
            source.fetch(WEIGHTS)
        server.ends_after = None
        again = SeedServer(model_at(url, tmp_path), KEY)
        again.files()
        assert again.fetch(WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        assert server.offsets == [0, size // 2]
    with pytest.raises(ModelError, match="cannot be reached"):
        again.files()


def test_damaged_bytes_are_found(folder: Path, tmp_path: Path) -> None:
    with seed_of(folder) as (server, url):
        source = SeedServer(model_at(url, tmp_path), KEY)
        source.files()
        server.damages = True
        with pytest.raises(ModelError, match="arrived damaged"):
            source.fetch(WEIGHTS)
        server.damages = False
        assert source.fetch(WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_another_key_is_refused(folder: Path, tmp_path: Path) -> None:
    with seed_of(folder) as (_, url), pytest.raises(ModelError, match="give both the same key"):
        fetch_config(model_at(url, tmp_path), "wrong")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a//b", "", "a\\b"])
def test_names_that_leave_the_folder(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: dict[str, Any] = {"files": [{"name": name, "size": 1, "changed_ns": 1}]}
    with seed_of(folder) as (_, url):
        monkeypatch.setattr(Answer, "do_GET", lambda self: answer(self, listed))
        with pytest.raises(ModelError, match="no file of a model's folder"):
            SeedServer(model_at(url, tmp_path), KEY).files()


def answer(request: Answer, content: dict[str, Any]) -> None:
    request.send_response(200)
    request.end_headers()
    request.wfile.write(json.dumps(content).encode())


class Serving(FakeService):
    folder = ""

    def server_info(self) -> dict[str, Any]:
        return {"options": {"model_path": {"value": self.folder}}}


def test_routes(folder: Path) -> None:
    """The admin key, files that are a model's, an offset, and the digest behind the bytes."""
    service = Serving()
    service.folder = str(folder)
    with TestClient(http_app(service, HttpSettings(keys=Keys(["user"], KEY)))) as http:
        assert http.get("/model_files", headers={"authorization": "Bearer user"}).status_code == 401
        assert http.get(f"/model_files/{WEIGHTS}").status_code == 401
        http.headers["authorization"] = f"Bearer {KEY}"
        names = {file["name"] for file in http.get("/model_files").json()["files"]}
        assert {WEIGHTS, "config.json", "tokenizer.json"} <= names and "private.key" not in names
        content = (folder / WEIGHTS).read_bytes()
        for offset in (0, 1000, len(content), len(content) + 7):
            found = http.get(f"/model_files/{WEIGHTS}?offset={offset}")
            assert found.content == content[offset:] + sha256(content).digest()
        for name in ("private.key", "../outside", "absent"):
            assert http.get(f"/model_files/{name}").status_code == 404
        assert http.get(f"/model_files/{WEIGHTS}?offset=-1").json()["error"]["param"] == "offset"


def test_options_that_do_not_fit() -> None:
    ip = "--remote-instance-weight-loader-seed-instance-ip"
    with pytest.raises(OptionsError, match=f"give {ip} and --remote"):
        plan_for(from_argv(["--load-format", "remote_instance", "--model-path", "tiny"]))
    with pytest.raises(OptionsError, match=f"{ip} does nothing without --load-format remote_instance"):
        plan_for(from_argv([ip, "127.0.0.1"]))


def test_two_servers_give_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    with serve("--model-path", str(folder), "--admin-api-key", KEY, "--dtype", "float32") as first:
        port = first.url.rpartition(":")[2]
        options = (
            *("--load-format", "remote_instance", "--model-path", "tiny", "--admin-api-key", KEY),
            *("--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1"),
            *("--remote-instance-weight-loader-seed-instance-service-port", port),
            *("--download-dir", str(tmp_path), "--dtype", "float32"),
        )
        with serve(*options) as second:
            answers = [
                httpx.post(
                    f"{server.url}/generate",
                    json={
                        "input_ids": [5, 200, 31, 7],
                        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
                    },
                    timeout=60,
                ).json()["output_ids"]
                for server in (first, second)
            ]
            assert answers[0] == answers[1] and len(answers[0]) == 8
            assert second.client.models.list().data[0].id == "tiny"


def test_a_seed_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "runtime", "serve", "--port", "0", "--load-format", "remote_instance"),
            *("--model-path", "tiny", "--download-dir", str(tmp_path)),
            *("--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1"),
            *("--remote-instance-weight-loader-seed-instance-service-port", str(port)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ,
    )
    assert ended.returncode == 2 and "cannot be reached" in ended.stderr and "Traceback" not in ended.stderr
