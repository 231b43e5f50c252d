"""Downloads from a stub of the hub: resumed, checked, offline, and errors that say what to do."""

import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from runtime.errors import ModelError
from runtime.hub.child import Report
from runtime.hub.download import fetch_config, fetch_weights
from runtime.hub.source import HubModel
from tests.hub.stub import COMMIT, Hub, serving

pytestmark = pytest.mark.anyio
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text("{}")
    (files / "tokenizer.json").write_text('{"a": 1}')
    (files / WEIGHTS).write_bytes(bytes(range(256)) * 100_000)
    with serving(Hub(files)) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield stub


@pytest.fixture
def model(tmp_path: Path) -> HubModel:
    return HubModel(repo="org/tiny", cache_dir=str(tmp_path / "cache"))


async def weights(model: HubModel) -> tuple[Path, list[Report]]:
    seen: list[Report] = []
    return await fetch_weights(model, seen.append), seen


async def test_small_files_first_and_weights_to_the_same_folder(hub: Hub, model: HubModel) -> None:
    folder = fetch_config(model)
    assert folder.name == COMMIT and sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "tokenizer.json",
    ]
    assert WEIGHTS not in hub.served
    again, progress = await weights(model)
    assert again == folder and (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert progress[-1].done == progress[-1].total == len(hub.files[WEIGHTS])
    hub.served.clear()
    assert fetch_config(model) == folder and await weights(model)
    assert not hub.served, "what is stored is not fetched again"


async def test_stored_files_are_compared_where_that_is_asked_for(hub: Hub, model: HubModel) -> None:
    folder, _ = await weights(model)
    stored = (folder / WEIGHTS).resolve()
    stored.chmod(0o600)
    stored.write_bytes(bytes(len(hub.files[WEIGHTS])))
    hub.served.clear()
    await weights(model)
    assert not hub.served and (folder / WEIGHTS).read_bytes() != hub.files[WEIGHTS], "it is trusted"
    await fetch_weights(model, lambda progress: None, checks=True)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS] and hub.served[WEIGHTS]


async def test_checksums_need_the_hub(hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    await weights(model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="checksums of org/tiny are on the hub"):
        await fetch_weights(model, lambda progress: None, checks=True)


async def test_a_transfer_that_breaks_is_resumed(hub: Hub, model: HubModel) -> None:
    """Whether within one start or by the next one: what is here is not sent again."""
    hub.cuts[WEIGHTS] = 23_000_000
    for _ in range(3):
        try:
            folder, _ = await weights(model)
            break
        except ModelError:
            continue
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    chunk = 10 * 2**20  # what the library writes at once
    assert hub.served[WEIGHTS] < len(hub.files[WEIGHTS]) + chunk


async def test_a_damaged_file_is_fetched_once_more(hub: Hub, model: HubModel) -> None:
    hub.damaged[WEIGHTS] = 1
    folder, _ = await weights(model)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS] and hub.served[WEIGHTS] == 2 * len(
        hub.files[WEIGHTS]
    )


async def test_files_that_stay_damaged_are_not_served(hub: Hub, model: HubModel) -> None:
    hub.damaged[WEIGHTS] = 9
    with pytest.raises(ModelError, match=f"{WEIGHTS} arrived damaged twice"):
        await weights(model)


async def test_a_private_model_needs_the_token(
    hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelError, match="neither a folder here nor a model on the hub.*HF_TOKEN"):
        fetch_config(model)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch_config(model).name == COMMIT


async def test_what_the_hub_refuses(hub: Hub, model: HubModel) -> None:
    with pytest.raises(ModelError, match="no revision v9"):
        fetch_config(HubModel(repo="org/tiny", revision="v9", cache_dir=model.cache_dir))
    with pytest.raises(ModelError, match="neither a folder here nor a model"):
        fetch_config(HubModel(repo="org/other", cache_dir=model.cache_dir))
    hub.is_gated = True
    with pytest.raises(ModelError, match="gated: accept its terms"):
        fetch_config(model)


async def test_offline_serves_what_is_stored(
    hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not stored here, and the hub cannot be reached"):
        fetch_config(model)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = fetch_config(model)
    await weights(model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.served.clear()
    assert fetch_config(model) == folder and (await weights(model))[0] == folder and not hub.served


async def test_a_hub_that_is_down_is_like_none(
    hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_config(model)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_config(model) == folder


async def test_nothing_in_the_working_folder_is_imported(
    hub: Hub, model: HubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise SystemExit('code of the working folder')")
    monkeypatch.chdir(tmp_path)
    assert fetch_config(model).name == COMMIT


async def test_modelscope_goes_through_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the library stands for it; without it the error says what to install."""
    model = HubModel(repo="org/tiny", revision="v1", hub="modelscope")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "modelscope.py").write_text("raise ImportError")
    with pytest.raises(ModelError, match="pip install modelscope"):
        fetch_config(model)
    (tmp_path / "modelscope.py").write_text(
        "def snapshot_download(repo, revision, allow_patterns, ignore_patterns):\n"
        "    assert (repo, revision) == ('org/tiny', 'v1') and '*.json' in allow_patterns\n"
        "    return '/models/tiny'\n"
    )
    assert fetch_config(model) == Path("/models/tiny")


async def test_a_download_ends_with_its_server(hub: Hub, model: HubModel) -> None:
    """Also with one that was killed: nothing goes on in the background."""
    hub.stalls[WEIGHTS] = 1_000_000
    code = (
        "import anyio\nfrom runtime.hub.download import fetch_weights\n"
        "from runtime.hub.source import HubModel\n"
        f"model = HubModel(repo='org/tiny', cache_dir={model.cache_dir!r})\n"
        "anyio.run(fetch_weights, model, lambda progress: None)"
    )
    server = await anyio.open_process([sys.executable, "-c", code])
    await anyio.to_thread.run_sync(hub.has_stalled.wait)
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    server.kill()
    await server.wait()
    with anyio.fail_after(30):
        while Path(f"/proc/{child}").exists():
            await anyio.sleep(0.01)
    await server.aclose()
