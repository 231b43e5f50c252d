"""--model-path URL: models on another machine, through fsspec."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.hub.child import download, wanted
from runtime.hub.download import fetch_config
from runtime.hub.remote import RemoteFolder
from runtime.hub.source import HubModel, RemoteFile, hub_model
from tests.models.make import make_checkpoint


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("remote") / "tiny", shard_size="60KB")


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/tiny"
    server.shutdown()
    thread.join()
    server.server_close()


def model_of(url: str, cache: Path) -> HubModel:
    model = hub_model(url, None, str(cache))
    assert model is not None and model.hub == "url"
    return model


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_folder_at_a_url(scheme: str, folder: Path, url: str, tmp_path: Path) -> None:
    """Small files first, then the weights; what is here is not fetched again, and what has changed is."""
    model = model_of(url if scheme == "http" else f"file://{folder}", tmp_path)
    local = fetch_config(model)
    assert (local / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not list(local.glob("*.safetensors"))
    assert download(RemoteFolder(model), "weights") == local
    stored = {path.name: path for path in local.glob("*.safetensors")}
    assert {name: path.read_bytes() for name, path in stored.items()} == {
        path.name: path.read_bytes() for path in folder.glob("*.safetensors")
    }
    times = {name: path.stat().st_mtime_ns for name, path in stored.items()}
    stored[min(stored)].write_bytes(b"cut")
    download(RemoteFolder(model), "weights")
    again = {name: path.stat().st_mtime_ns for name, path in stored.items()}
    assert {name for name in stored if again[name] != times[name]} == {min(stored)}


def test_what_is_not_there(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        fetch_config(model_of(f"{url}-other", tmp_path))
    with pytest.raises(ModelError, match="cannot be opened"):
        fetch_config(model_of("nothing://bucket/model", tmp_path))


def test_without_the_network_the_copy_serves(folder: Path, tmp_path: Path) -> None:
    model = model_of("http://127.0.0.1:9/tiny", tmp_path)
    with pytest.raises(ModelError, match="not stored here"):
        fetch_config(model)


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1, None) for name in names]


@pytest.mark.parametrize(
    ("names", "load_format", "chosen"),
    [
        (("a.safetensors", "pytorch_model.bin", "consolidated.safetensors"), "auto", ["a.safetensors"]),
        (("a.safetensors", "pytorch_model.bin"), "pt", ["pytorch_model.bin"]),
        (("pytorch_model.bin", "training_args.bin"), "auto", ["pytorch_model.bin"]),
        (("a.safetensors", "consolidated.safetensors"), "mistral", ["consolidated.safetensors"]),
        (("consolidated.safetensors", "original/a.bin"), "auto", ["consolidated.safetensors"]),
    ],
)
def test_which_files_have_the_weights(names: tuple[str, ...], load_format: str, chosen: list[str]) -> None:
    assert [file.name for file in wanted(files(*names), "weights", load_format)] == chosen
