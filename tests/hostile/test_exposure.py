"""What the server opens to others: sockets, addresses that requests name, code that a model folder brings,
keys, and caches that requests fill."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime
from runtime.http.auth import Keys
from tests.hostile.case import CHAT, RESPONSES, Case, chat, content, dump, schema
from tests.hostile.target import MODEL, NULL, OPTIONS, Target, target
from tests.hostile.wire import exchange

POCKET = Path(runtime.__file__).parent / "pocket"
LISTENS = "0A"  # proc(5): the state of a socket
CODE = "from pathlib import Path\nPath(__file__).with_name('was_run').touch()\n"
NAMES = ("configuration_evil", "modeling_evil", "tokenization_evil", "processing_evil")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that brings code: under every name by which other servers find it."""
    folder = tmp_path_factory.mktemp("evil")
    for file in POCKET.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "model.safetensors").symlink_to(POCKET / "model.safetensors")
    for name in NAMES:
        (folder / f"{name}.py").write_text(CODE)
    for file, key in (("config.json", "Model"), ("tokenizer_config.json", "Tokenizer")):
        values = json.loads((folder / file).read_text())
        values["auto_map"] = {f"Auto{key}": f"modeling_evil.{key}", "AutoConfig": "configuration_evil.Config"}
        (folder / file).write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Target]:
    options = ("--model-path", str(folder), "--tp-size", "2")
    with target(tmp_path_factory.mktemp("server"), *NULL, *OPTIONS, *options) as running:
        yield running


def listening(server: Target) -> list[str]:
    """Local addresses of all sockets of the server's processes on which others can reach them."""
    sockets = set()
    for pid in server.pids():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except FileNotFoundError:
                continue
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets and (fields[3] == LISTENS or table.startswith("udp")):
                found.append(fields[1])
    return found


def test_one_socket_of_all_processes_listens_and_on_this_machine_alone(server: Target) -> None:
    assert listening(server) == [f"0100007F:{server.port:04X}"]


@pytest.mark.full
def test_ranks_that_compute_together_listen_on_this_machine_alone(tmp_path: Path) -> None:
    with target(tmp_path, *MODEL, *OPTIONS, "--tp-size", "2") as server:
        assert all(address.startswith("0100007F:") for address in listening(server))


def test_no_address_in_a_request_is_connected_to(server: Target) -> None:
    """By images, files, schemas, templates, adapters: a listener that all of them name gets no connection."""

    async def ask() -> int:
        num_connections = 0

        def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.close()

        async with await asyncio.start_server(come, "127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/x"
            part = {"type": "input_image", "image_url": url}
            for path, body in (
                (CHAT, content({"type": "image_url", "image_url": {"url": url}})),
                (CHAT, content({"type": "video_url", "video_url": {"url": url}})),
                (CHAT, schema({"$ref": url, "$schema": url, "$id": url})),
                (CHAT, content({"type": "text", "text": f"![x]({url}) <img src={url}>"})),
                (CHAT, chat(model=url)),
                (CHAT, chat(lora_path=url)),
                (CHAT, chat(chat_template=url)),
                (RESPONSES, dump({"input": [{"role": "user", "content": [part]}]})),
                (
                    RESPONSES,
                    dump({"input": "x", "tools": [{"type": "mcp", "server_label": "x", "server_url": url}]}),
                ),
            ):
                reply = await exchange(server.port, Case("x", path, body).request())
                assert reply.status < 500, reply.body
        return num_connections

    assert asyncio.run(ask()) == 0


def test_code_of_a_model_folder_is_not_run(server: Target, folder: Path) -> None:
    assert asyncio.run(exchange(server.port, Case("x", CHAT, chat()).request())).status == 200
    assert not (folder / "was_run").exists() and not list(folder.rglob("__pycache__"))


def test_what_is_kept_of_a_key_is_a_digest() -> None:
    """So neither a look-up's time nor a dump of the object says anything about it."""
    keys = Keys(["secret-of-a-user"], "secret-of-the-admin")
    kept = [getattr(keys, name) for name in Keys.__slots__]
    assert "secret-of" not in repr(kept)
    assert Keys(["a"])._digest(b"a") != Keys(["a"])._digest(b"a")  # under a secret of each process
