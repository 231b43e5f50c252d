"""A model by its name on the hub: from `runtime serve` to the first token."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from runtime.options.parse import from_argv
from runtime.options.resolve import plan_for
from tests.e2e.serving import serve
from tests.hub.stub import COMMIT, Hub, serving
from tests.models.make import make_checkpoint


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Hub]:
    folder = make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))
    return lambda: Hub(folder)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("environment")
def test_a_model_is_served_by_its_name(
    hub: Callable[[], Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(hub()) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        arguments = ("--model-path", "org/tiny", "--download-dir", str(tmp_path / "cache"))
        with serve(*arguments, "--num-threads", "1") as server:
            card = server.client.models.list().data[0]
            assert card.id == "org/tiny"
            answer = server.client.completions.create(model=card.id, prompt="a", max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens >= 1
            info = httpx.get(f"{server.url}/server_info").json()
            assert COMMIT in info["options"]["model_path"]["value"]
    served_again = plan_for(from_argv(["--device", "null", *arguments]))
    assert served_again.why["served_model_name"].value == "org/tiny"


@pytest.mark.usefixtures("environment")
def test_what_a_model_lacks_is_one_line(
    hub: Callable[[], Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that cannot be downloaded end the start like any other error of it."""
    stub = hub()
    for name in [name for name in stub.files if name.endswith(".safetensors")]:
        del stub.files[name]
    with serving(stub):
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        ended = subprocess.run(
            [sys.executable, "-m", "runtime", "serve", "--port", "0", "--model-path", "org/tiny"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 2 and "has no safetensors" in ended.stderr and "Traceback" not in ended.stderr
