"""What --model-path means."""

from pathlib import Path

import pytest

from runtime.cli import main
from runtime.errors import ModelError
from runtime.hub.child import RemoteFile, wanted
from runtime.hub.source import HubModel, hub_model


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("model.gguf", "does not exist here; give a GGUF file"),
        ("org/some.GGUF", "does not exist here; give a GGUF file"),
        ("org/name/more/some.GGUF/..", "does not exist"),
        ("here/config.json", "is a file; give the folder"),
        ("missing", "does not exist; give a folder"),
        ("/missing/folder", "does not exist; give a folder"),
        ("./org/name", "does not exist"),
        ("org/name/more", "does not exist"),
        ("", "--model-path is empty"),
        ("org/\0", "has a NUL"),
    ],
)
def test_what_cannot_be(path: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=error):
        hub_model(path)


@pytest.mark.parametrize(
    "path",
    [
        "http://me:s3cret@host/model",
        "s3://s3cret@bucket",
        "HTTPS://me:s3cret/x@host/m",
        "http://:s3cret@host:80/m",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.cli.end_at_once_on_signals", lambda: None)
    for words in (["serve", "--model-path", path], ["check", "explain", "-m", "x", "--tokenizer-path", path]):
        assert main(words) == 2
        printed = "".join(capsys.readouterr())
        assert "with a user name or password" in printed and "s3cret" not in printed


@pytest.mark.parametrize("path", ["http://host:80/model@v1", "s3://bucket/a@b", "http://host/x:y@z"])
def test_an_at_sign_behind_the_host_is_no_password(path: str) -> None:
    assert hub_model(path) == HubModel(repo=path, hub="url")


def test_a_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name", "v1", "/cache", {}) == HubModel(
        repo="org/name", revision="v1", cache_dir="/cache"
    )
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_model("org/name") is None


@pytest.mark.parametrize(
    ("value", "hub"),
    [("true", "modelscope"), ("1", "modelscope"), ("false", "huggingface"), ("", "huggingface")],
)
def test_the_references_variable_chooses_modelscope(value: str, hub: str) -> None:
    model = hub_model("org/name", environment={"SGLANG_USE_MODELSCOPE": value})
    assert model is not None and model.hub == hub


def test_the_same_weights_in_other_forms_are_left_out() -> None:
    names = [
        *(
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ),
        *(
            "consolidated.safetensors",
            "original/consolidated.00.pth",
            "onnx/config.json",
            "pytorch_model.bin",
        ),
        *("README.md", ".gitattributes", "1_Pooling/config.json", "chat_template.jinja"),
    ]
    files = [RemoteFile(name, 1, None) for name in names]
    assert [file.name for file in wanted(files, "weights")] == ["model-00001-of-00002.safetensors"]
    assert sorted(file.name for file in wanted(files, "config")) == [
        *("1_Pooling/config.json", "chat_template.jinja", "config.json"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]


@pytest.mark.parametrize(
    ("names", "part", "error"),
    [
        (["config.json", "model.onnx"], "weights", r"no safetensors.*\(it has .onnx\)"),
        (["model.Q4_K_M.gguf"], "config", r"no config.json.*\(it has .gguf\).*NAME/model.Q4_K_M.gguf"),
        (["README.md"], "config", "no config.json"),
    ],
)
def test_models_in_other_formats_are_named(names: list[str], part: str, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        wanted([RemoteFile(name, 1, None) for name in names], part)  # type: ignore[arg-type]
