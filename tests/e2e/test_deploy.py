"""docs/deploy.md as it is written: nginx in front of servers, and what the probes of Kubernetes ask."""

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
import yaml

from tests.e2e.serving import WAIT_S, Server, serve
from tests.http.test_tls import make
from tests.metrics.read import sample
from tests.shape.source import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
WHOLE, PREFIX, SEVERAL = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
NAME = "llm.example"
NULL = ("--device", "null", "--null-step-s", "0.02", "--allowed-hosts", NAME)
MAIN = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{site}
}}
"""

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin") is None
    or shutil.which("openssl") is None,
    reason="nginx or openssl is not installed",
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tls"), "server")


def replaced(text: str, changes: dict[str, str]) -> str:
    """`text` with each key, which must be in it, replaced by its value."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@contextmanager
def nginx(site: str, certificate: Path, folder: Path) -> Iterator[httpx.Client]:
    """nginx with the page's configuration on a free port; a client of it that knows its certificate."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = replaced(
        site,
        {
            "listen 443 ": f"listen 127.0.0.1:{port} ",
            "/etc/nginx/tls/chain.pem": str(certificate),
            "/etc/nginx/tls/key.pem": str(certificate.with_suffix(".key")),
        },
    )
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, site=site))
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
    process = subprocess.Popen(
        [str(program), "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE, text=True
    )
    context = ssl.create_default_context(cafile=str(certificate))
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", headers={"host": NAME}, verify=context, timeout=WAIT_S
        ) as client:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    client.get("/metrics")
                    break
                except httpx.ConnectError:
                    assert process.poll() is None, process.communicate()[1]
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_S)
        assert process.stderr is not None
        process.stderr.close()


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*NULL, "--fastapi-root-path", "/llm") as running:
        yield running


@pytest.fixture(scope="module")
def proxy(
    server: Server, certificate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """nginx in front of the server, at the root, below /llm, and below /llm with the prefix stripped."""
    stripped = replaced(PREFIX, {"/llm/": "/cut/llm/", "http://runtime;": "http://runtime/;"})
    site = replaced(WHOLE, {"127.0.0.1:30000": address(server)})
    end = site.rindex("}")
    with nginx(
        site[:end] + PREFIX + stripped + "}\n", certificate, tmp_path_factory.mktemp("nginx")
    ) as client:
        yield client


def chat(max_tokens: int) -> dict[str, Any]:
    return {
        "model": "pocket",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


@needs_nginx
@pytest.mark.parametrize("path", ["", "/llm", "/cut/llm"])
def test_an_answer_and_what_nginx_keeps_to_itself(proxy: httpx.Client, path: str) -> None:
    body = chat(5) | {"stream": False}
    answer = proxy.post(f"{path}/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert proxy.get(f"{path}/health").status_code == 200
    assert proxy.get("/metrics").status_code == 403


@needs_nginx
@pytest.mark.parametrize("path", ["", "/llm", "/cut/llm"])
def test_the_console(proxy: httpx.Client, path: str) -> None:
    """Its page and all files that it names are there, and its script may ask from the page's own origin."""
    page = proxy.get(f"{path}/console")
    assert page.status_code == 200
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(files) > 2
    assert all(proxy.get(page.url.join(file)).status_code == 200 for file in files)
    body = chat(1) | {"stream": False}
    answer = proxy.post(f"{path}/v1/chat/completions", json=body, headers={"origin": f"https://{NAME}"})
    assert answer.status_code == 200


@needs_nginx
def test_tokens_go_on_as_they_come_and_a_client_that_leaves_ends_its_request(
    proxy: httpx.Client, server: Server
) -> None:
    """The stream is far from its end when its first events are here."""
    with proxy.stream("POST", "/v1/chat/completions", json=chat(1900)) as answer:
        lines = answer.iter_lines()  # when this object goes, the stream is closed
        events = [next(lines) for _ in range(9)][::2]
        assert all(json.loads(event[6:])["choices"][0]["finish_reason"] is None for event in events)
        assert server.load()["num_running_reqs"] == 1
    server.wait(lambda: server.load()["num_running_reqs"] == 0)


@needs_nginx
def test_bodies_and_names(proxy: httpx.Client) -> None:
    large = {"model": "pocket", "prompt": "x" * 2**20, "max_tokens": 1}
    assert "context" in proxy.post("/v1/completions", json=large).text  # it came through, and is too long
    assert proxy.post("/v1/completions", content=b"x" * (17 * 2**20)).status_code == 413
    assert proxy.get("/v1/models", headers={"host": "other.example"}).status_code == 403


@needs_nginx
def test_a_websocket(proxy: httpx.Client, certificate: Path) -> None:
    async def talk() -> Any:
        url = str(proxy.base_url).replace("https:", "wss:").rstrip("/") + "/v1/ws"
        context = ssl.create_default_context(cafile=str(certificate))
        port = proxy.base_url.port
        async with websockets.connect(
            url.replace("127.0.0.1", NAME),
            ssl=context,
            host="127.0.0.1",
            port=port,
            server_hostname="127.0.0.1",
            origin=websockets.Origin(f"https://{NAME}"),
        ) as socket:
            body = chat(3) | {"stream": False}
            await socket.send(json.dumps({"id": "a", "path": "/v1/chat/completions", "body": body}))
            return json.loads(await socket.recv())

    answer = asyncio.run(talk())
    assert answer["id"] == "a" and answer["answer"]["usage"]["completion_tokens"] == 3


@needs_nginx
def test_several_servers(server: Server, certificate: Path, tmp_path: Path) -> None:
    """A key stays with its server; when that is gone its requests go to the other one."""
    start, end = WHOLE.index("upstream"), WHOLE.index("server {\n")
    with serve(*NULL, "--served-model-name", "second") as second:
        changes = {"10.0.0.1:30000": address(server), "10.0.0.2:30000": address(second)}
        site = replaced(WHOLE[:start] + SEVERAL + WHOLE[end:], changes)
        with nginx(site, certificate, tmp_path) as client:
            keys = [f"key-{number}" for number in range(16)]
            assert {model(client, key) for key in keys} == {"pocket", "second"}
            assert all(model(client, key) == model(client, key) for key in keys)
            second.process.terminate()
            second.process.wait(WAIT_S)
            assert {model(client, key) for key in keys} == {"pocket"}


def model(client: httpx.Client, key: str) -> str:
    """Name of the model of the server that a request with this key reaches."""
    answer = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    return str(answer.json()["data"][0]["id"])


def test_probes_of_kubernetes(tmp_path: Path) -> None:
    """Readiness follows the server's state, and liveness does not: neither a rank that is killed nor draining
    ends the pod."""
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")))
    keys = next(one for one in manifests if one["kind"] == "Secret")["stringData"]["keys"]
    pod = next(one for one in manifests if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    (tmp_path / "keys").write_text(keys)
    (tmp_path / "keys").chmod(0o600)
    own = [word for word in container["args"] if not word.startswith(("--model-path", "--api-key-file"))]
    with serve(*NULL, "--api-key-file", str(tmp_path / "keys"), *own) as server:
        assert all(server.get(path).status_code == 200 for path in paths.values())
        for pid in server.rank_pids():
            subprocess.run(["kill", "-9", str(pid)], check=True)
        server.wait(lambda: restarts(server.get(paths["liveness"])) >= 1)
        server.wait(lambda: server.get(paths["readiness"]).status_code == 200)
        header = {"authorization": f"Bearer {keys.split()[1]}"}
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=chat(1900), headers=header, timeout=WAIT_S
        ) as answer:
            lines = answer.iter_lines()  # when this object goes, the stream is closed
            assert answer.status_code == 200 and next(lines)
            server.process.terminate()
            server.wait(lambda: server.get(paths["readiness"]).status_code == 503)
            assert server.get(paths["liveness"]).status_code == 200
            server.process.terminate()  # the second signal: its grace period is over


def restarts(answer: httpx.Response) -> float:
    assert answer.status_code == 200
    return sample(answer.content, "runtime_rank_restarts_total")
