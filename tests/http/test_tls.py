"""HTTPS with certificates made here: HTTP/2 and HTTP/1.1, clients that must show theirs, and files that are
wrong."""

import json
import shutil
import ssl
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import httpx
import openai
import pytest

from runtime.errors import StartError
from runtime.http.app import http_app
from runtime.http.server import tls_context
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl"),
]


def make(folder: Path, name: str, *more: str) -> Path:
    """A certificate that signs itself; its key stands in NAME.key."""
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(folder / f"{name}.key"),
            "-out",
            str(folder / f"{name}.pem"),
            *(more or ("-nodes",)),
        ],
        check=True,
        capture_output=True,
    )
    return folder / f"{name}.pem"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tls"), "server")


def key_of(certificate: Path) -> str:
    return str(certificate.with_suffix(".key"))


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@pytest.mark.parametrize("http2", [True, False])
async def test_both_protocols(certificate: Path, http2: bool) -> None:
    tls = tls_context(str(certificate), key_of(certificate), None, None)
    async with (
        serving(http_app(FakeService(), HttpSettings(max_body_bytes=1_000)), tls=tls) as (host, port),
        httpx.AsyncClient(
            http2=http2, verify=trusting(certificate), base_url=f"https://{host}:{port}"
        ) as http,
    ):
        whole = await http.post("/generate", json={"text": "hi"})
        assert whole.http_version == ("HTTP/2" if http2 else "HTTP/1.1") and whole.headers["x-request-id"]
        stream = await http.post("/generate", json={"text": "hi", "stream": True})
        *_, last, done, _ = stream.text.split("\n\n")
        assert (
            done == "data: [DONE]" and json.loads(last.removeprefix("data: "))["text"] == whole.json()["text"]
        )
        assert (await http.post("/generate", content=b"x" * 300_000)).status_code == 413
        with pytest.raises(httpx.RemoteProtocolError) if http2 else nullcontext():
            assert (
                await http.get("/health", headers={"x": "y" * (70_000 if http2 else 200_000)})
            ).status_code in (400, 431)
        assert (await http.get("/health")).status_code == 200, "others go on"


async def test_the_openai_client_over_http2(certificate: Path) -> None:
    tls = tls_context(str(certificate), key_of(certificate), None, None)
    async with (
        serving(FakeService(), tls=tls) as (host, port),
        openai.AsyncOpenAI(
            base_url=f"https://{host}:{port}/v1",
            api_key="x",
            max_retries=0,
            http_client=httpx.AsyncClient(http2=True, verify=trusting(certificate)),
        ) as client,
    ):
        stream = await client.chat.completions.create(
            model="org/fake", stream=True, messages=[{"role": "user", "content": "hi"}]
        )
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


async def test_clients_must_show_a_certificate(certificate: Path, tmp_path: Path) -> None:
    mine = make(tmp_path, "client")
    tls = tls_context(str(certificate), key_of(certificate), None, str(mine))
    async with serving(FakeService(), tls=tls) as (host, port):
        known, unknown = trusting(certificate), trusting(certificate)
        known.load_cert_chain(mine, key_of(mine))
        async with httpx.AsyncClient(verify=known) as http:
            assert (await http.get(f"https://{host}:{port}/health")).status_code == 200
        async with httpx.AsyncClient(verify=unknown) as http:
            with pytest.raises(
                (httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError, httpx.WriteError)
            ):
                await http.get(f"https://{host}:{port}/health")


async def test_plain_http_gets_nothing(certificate: Path) -> None:
    async with serving(FakeService(), tls=tls_context(str(certificate), key_of(certificate), None, None)) as (
        host,
        port,
    ):
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{host}:{port}/health")


WRONG: list[tuple[str, Callable[[Path, Path], tuple[str, str | None, str | None, str | None]]]] = [
    ("no certificate", lambda own, other: ("/nowhere.pem", None, None, None)),
    ("no key", lambda own, other: (str(own), None, None, None)),
    ("another's key", lambda own, other: (str(own), key_of(other), "word", None)),
    ("no password", lambda own, other: (str(other), key_of(other), None, None)),
    ("a wrong password", lambda own, other: (str(other), key_of(other), "wr0ng-s3cret", None)),
    ("no authorities", lambda own, other: (str(own), key_of(own), None, "/nowhere.pem")),
]


@pytest.mark.parametrize("files", [files for _, files in WRONG], ids=[name for name, _ in WRONG])
def test_wrong_files_prevent_the_start(
    certificate: Path,
    tmp_path: Path,
    files: Callable[[Path, Path], tuple[str, str | None, str | None, str | None]],
) -> None:
    other = make(tmp_path, "other", "-passout", "pass:word")
    assert tls_context(str(other), key_of(other), "word", None)
    with pytest.raises(StartError, match="TLS cannot start .*--ssl-c") as caught:
        tls_context(*files(certificate, other))
    assert "s3cret" not in str(caught.value)
