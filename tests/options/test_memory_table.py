"""docs/model_memory.md is what `runtime check memory` says of the models in it."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from runtime.cli import main

ROOT = Path(__file__).resolve().parents[2]

# billions of parameters, as the publishers give them; a bf16 weight takes 2 bytes
PARAMETERS = {
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Mistral-7B-v0.3": 7.25,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-7B": 7.62,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "DeepSeek-V3": 671,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("draw_memory_table", ROOT / "docs" / "draw_memory_table.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    assert script.PAGE.read_text("utf-8") == script.page(), "run python docs/draw_memory_table.py"


def test_weights_are_those_of_the_published_models(script: ModuleType) -> None:
    configs = script.configs()
    assert configs.keys() == PARAMETERS.keys()
    for name, billions in PARAMETERS.items():
        weights = script.measure(configs[name], "bf16").weights_bytes
        assert weights / 2e9 == pytest.approx(billions, rel=0.006), name


def test_figures_are_those_of_the_command(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = script.configs()["Llama-3.1-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in (ROOT / "runtime" / "pocket").glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options = ["--model-path", str(tmp_path), "--dtype", "bfloat16", "--device", "cpu"]
    main(["check", "memory", "--json", "--load-format", "dummy", *options])
    rank = json.loads(capsys.readouterr().out)["rank"]
    take = script.measure(config, "bf16")
    assert (rank["weights_bytes"], rank["token_bytes"]) == (take.weights_bytes, take.token_bytes)


def test_the_script_writes_the_page(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "docs"
    copy.mkdir()
    for name in ("draw_memory_table.py", "model_configs.json"):
        (copy / name).write_bytes((ROOT / "docs" / name).read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([sys.executable, copy / "draw_memory_table.py"], check=True, capture_output=True)
    assert (copy / "model_memory.md").read_text("utf-8") == script.PAGE.read_text("utf-8")
