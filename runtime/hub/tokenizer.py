"""Tokenizers in other forms than tokenizer.json: converted once by a process of their own
(convert_tokenizer.py), and kept in the user's caches under the hash of what they were made of."""

import os
import shutil
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

from runtime import log
from runtime.errors import ModelError, install_line
from runtime.hub.download import environment_of_child
from runtime.regular_file import read_regular

VERSION = b"1"  # of the conversion: another one converts again
FORMS = ("tekken.json", "tokenizer.model", "tokenizer.model.v*", "tiktoken.model", "*.tiktoken")
# what the folder says of its tokenizer besides; config.json names the class
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def tokenizer_source(folder: Path, *, prefers_slow: bool = False) -> Path | None:
    """The file that a tokenizer must be converted from; None: tokenizer.json is there, or nothing is.
    `prefers_slow`: it is converted although tokenizer.json is there."""
    if (folder / "tokenizer.json").is_file() and not prefers_slow:
        return None
    return next((path for form in FORMS for path in sorted(folder.glob(form)) if path.is_file()), None)


def converted_tokenizer(folder: Path, source: Path, cache: Path) -> Path:
    """The folder with tokenizer.json of a tokenizer of `folder`, from the cache or made now. Blocks for
    the time that transformers takes to start. Raises ModelError."""
    try:
        target = cache / "tokenizers" / _digest(folder, source)
        if (target / "tokenizer.json").is_file():
            return target
        log.get("tokenizer").info("converting to tokenizer.json, once", file=source.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(mkdtemp(prefix=".new-", dir=target.parent))
        try:
            return _convert(folder, source, work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{source.name} cannot be converted to tokenizer.json ({error}); set XDG_CACHE_HOME to a folder "
            "that can be written, or give a folder with tokenizer.json as --tokenizer-path"
        ) from None


def _digest(folder: Path, source: Path) -> str:
    found = blake2b(VERSION, digest_size=16)
    for path in (source, *(folder / name for name in (*COMPANIONS, *TEMPLATES))):
        if path.is_file():
            found.update(path.name.encode() + b"\0" + blake2b(read_regular(path)).digest())
    return found.hexdigest()


def _convert(folder: Path, source: Path, work: Path, target: Path) -> Path:
    given, made = work / "given", work / "made"
    given.mkdir()
    made.mkdir()
    name = "tokenizer.model" if source.name.startswith("tokenizer.model") else source.name
    shutil.copyfile(source, given / name)
    for companion in (folder / name for name in COMPANIONS):
        if companion.is_file():
            shutil.copyfile(companion, given / companion.name)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "runtime.hub.convert_tokenizer", str(given), str(made)],
        env=environment_of_child() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode or not (made / "tokenizer.json").is_file():
        why = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it wrote no tokenizer.json"])[
            -1
        ]
        raise ModelError(
            f"{source.name} of {folder} cannot be converted to tokenizer.json ({why}); install what reads it "
            f"({install_line('tokenizers')}), or give a folder with tokenizer.json as --tokenizer-path"
        )
    # what the folder itself says wins over what was made up for it
    for path in (folder / name for name in (*COMPANIONS[:2], *TEMPLATES)):
        if path.is_file():
            shutil.copyfile(path, made / path.name)
    if not target.exists():  # another start may have been faster
        os.rename(made, target)
    return target
