"""GGUF files of a hub: which one is meant, and a download of all its parts."""

from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.hub.download import fetch_gguf
from runtime.hub.gguf_files import wanted_gguf
from runtime.hub.source import HubModel, RemoteFile, hub_model
from tests.hub.stub import Hub, serving

FILES = [
    *(
        "README.md",
        "mmproj-F16.gguf",
        "tiny-Q4_K_M.gguf",
        "tiny-Q8_0.gguf",
        "big/tiny-F16-00001-of-00002.gguf",
    ),
    "big/tiny-F16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("path", "repo", "gguf"),
    [
        ("org/tiny:Q4_K_M", "org/tiny", "Q4_K_M"),
        ("org/tiny/tiny-Q8_0.gguf", "org/tiny", "tiny-Q8_0.gguf"),
        ("org/tiny/big/tiny.GGUF", "org/tiny", "big/tiny.GGUF"),
    ],
)
def test_a_path_names_a_file_of_a_model(path: str, repo: str, gguf: str) -> None:
    found = hub_model(path, environment={})
    assert found is not None and (found.repo, found.gguf, found.hub) == (repo, gguf, "huggingface")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("F16", ["big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"]),
    ],
)
def test_the_one_that_is_meant(given: str, names: list[str]) -> None:
    assert [one.name for one in wanted_gguf([RemoteFile(name, 1, None) for name in FILES], given)] == names


@pytest.mark.parametrize(
    ("files", "given", "words"),
    [
        (FILES, "tiny", "3 GGUF files with tiny in their names"),
        (FILES, "Q2_K", "no GGUF file Q2_K; there are big/tiny-F16"),
        (["a.safetensors"], "Q8_0", "no GGUF file Q8_0; there are none at all"),
        (FILES[:-1], "F16", "lacks big/tiny-F16-00002-of-00002.gguf"),
    ],
    ids=["several", "none", "no GGUF", "a part"],
)
def test_what_is_not_clear_is_named(files: list[str], given: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        wanted_gguf([RemoteFile(name, 1, None) for name in files], given)


def test_all_parts_are_downloaded_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    for name in FILES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode())
    model = HubModel(repo="org/tiny", cache_dir=str(tmp_path / "cache"), gguf="f16")
    with serving(Hub(source)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        path = fetch_gguf(model)
        assert hub.served.keys() == {"big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"}
    assert path.name == "tiny-F16-00001-of-00002.gguf" and path.read_bytes() == FILES[4].encode()
    assert path.with_name("tiny-F16-00002-of-00002.gguf").read_bytes() == FILES[5].encode()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_gguf(model) == path
    with pytest.raises(ModelError, match="no GGUF file Q8_0; there are big/tiny-F16"):
        fetch_gguf(HubModel(repo="org/tiny", cache_dir=str(tmp_path / "cache"), gguf="Q8_0"))
