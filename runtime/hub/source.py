"""What --model-path means: a folder of this machine, or a model that a hub has."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.gguf.container import is_gguf

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# a GGUF file of a model: org/name/file.gguf, or org/name:Q4_K_M for the one that has this in its name
_FILE = re.compile(rf"({_REPO.pattern})(?:/([\w./-]+\.gguf)|:([\w.-]+))", re.IGNORECASE)
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
# a user name or password before the host, also one with a slash in it; host:port/name@version has none
_SECRET = re.compile(r"([\w+.-]*://)(?:[^/?#]*@|[^/?#@]*:(?!\d*(?:[/?#]|$))[^@]*@)")
_TRUE = ("1", "true", "yes", "on")
# the reference's variable, and vLLM's
MODELSCOPE_VARIABLES = ("SGLANG_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")

# "seed": a server that serves the model (seed.py)
Hub = Literal["huggingface", "modelscope", "url", "seed"]


class RemoteFile(Struct, frozen=True):
    """A file of a model on a hub, at a URL or of another server."""

    name: str
    size: int  # bytes
    sha256: str | None  # None: not known, as of a small file, which git's own hash names


class HubModel(Struct, frozen=True, kw_only=True):
    """A model of a hub, at a revision."""

    repo: str  # org/name, or the URL of a folder or of a server
    revision: str | None = None  # branch, tag, commit, or version of a server's files; None: what is there
    cache_dir: str | None = None  # where it is stored; None: the hub library's own folder
    hub: Hub = "huggingface"
    load_format: str = "auto"  # which of the weights' forms is wanted
    gguf: str = ""  # name of the GGUF file that is wanted, or a part of it; empty: none is


def hub_model(
    path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> HubModel | None:
    """The model that `path` names on a hub; None for a folder of this machine.

    What exists here wins over the hub. Raises ModelError for a path that can be neither: a file, or a folder
    that does not exist and is not of the form org/name; and for a URL with a password, which is not repeated.
    """
    folder = Path(path)
    if found := _SECRET.match(path):
        raise ModelError(
            f"the path of a model or tokenizer is a {found[1]} URL with a user name or password, which would "
            "stand in logs and process lists; leave them out, and give them as fsspec reads them: in its own "
            "files, in variables FSSPEC_..., or for s3:// in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if URL.match(path):
        return HubModel(repo=path, cache_dir=download_dir, hub="url")
    if "\0" in path or not path:
        raise ModelError(
            "--model-path is empty or has a NUL; give a folder, or the name of a model on the hub"
        )
    if folder.is_dir() or is_gguf(folder):
        return None
    uses_modelscope = any(environment.get(name, "").lower() in _TRUE for name in MODELSCOPE_VARIABLES)
    if (found := _FILE.fullmatch(path)) is not None and not uses_modelscope:
        return HubModel(
            repo=found[1], revision=revision, cache_dir=download_dir, gguf=str(found[2] or found[3])
        )
    if folder.name.lower().endswith(".gguf"):
        raise ModelError(
            f"{path} does not exist here; give a GGUF file of this machine, or of a hub as "
            "org/name/file.gguf or org/name:Q4_K_M"
        )
    if folder.exists():
        raise ModelError(f"{path} is a file; give the folder that it is in, with config.json and the weights")
    if _REPO.fullmatch(path) is None:
        raise ModelError(
            f"{path} does not exist; give a folder with config.json and the weights, or the name of a model "
            "on the hub (org/name)"
        )
    hub: Hub = "modelscope" if uses_modelscope else "huggingface"
    return HubModel(repo=path, revision=revision, cache_dir=download_dir, hub=hub)
