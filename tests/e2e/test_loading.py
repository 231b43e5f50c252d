"""A server whose weights are pickles, whose config.json is encrypted, and which has no tokenizer."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import runtime
from runtime.errors import InvalidRequest, ModelError
from tests.models.reference import Reference
from tests.models.write_formats import write_bin

Checkpoint = Callable[[str], Path]


@pytest.mark.anyio
async def test_token_ids_of_an_encrypted_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, decrypted = tmp_path / "model", tmp_path / "decrypted.json"
    write_bin(checkpoint("qwen2"), folder)
    shutil.move(folder / "config.json", decrypted)
    (folder / "config.json").write_bytes(b"\x93encrypted")
    (folder / "tokenizer.json").unlink()
    options = {"num_threads": 1, "context_length": 256, "max_total_tokens": 2048, "dtype": "float32"}
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        await runtime.Engine(model_path=str(folder), **options).__aenter__()
    engine = runtime.Engine(
        model_path=str(folder),
        load_format="pt",
        decrypted_config_file=str(decrypted),
        skip_tokenizer_init=True,
        **options,
    )
    async with engine:
        prompt = [5, 200, 31, 7]
        whole = await engine.generate(prompt, temperature=0, max_new_tokens=6, ignore_eos=True)
        assert list(whole.token_ids) == Reference(checkpoint("qwen2")).greedy(prompt, 6) and whole.text == ""
        with pytest.raises(InvalidRequest, match="--skip-tokenizer-init"):
            await engine.generate("Hello", max_new_tokens=2)
        with pytest.raises(InvalidRequest, match="--skip-tokenizer-init"):
            await engine.generate(prompt, max_new_tokens=2, stop=["x"])
