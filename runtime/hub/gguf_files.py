"""Which files of a repository are the GGUF model that is wanted."""

from runtime.errors import ModelError
from runtime.hub.source import RemoteFile
from runtime.models.config.gguf.container import SPLIT


def gguf_names(files: list[RemoteFile]) -> list[str]:
    """The GGUF models of a repository: of split ones the first files. Image encoders are none."""
    names = sorted(file.name for file in files if file.name.lower().endswith(".gguf"))
    splits = {name: SPLIT.fullmatch(name) for name in names if "mmproj" not in name.lower()}
    return [name for name, split in splits.items() if split is None or int(split[2]) == 1]


def wanted_gguf(files: list[RemoteFile], given: str) -> list[RemoteFile]:
    """The files of the GGUF model that is called so, or that has this in its name, the first one in front.
    Raises ModelError where there is none, or more than one."""
    names = gguf_names(files)
    chosen = [name for name in names if name == given]
    chosen = chosen or [name for name in names if given.lower() in name.rpartition("/")[2].lower()]
    if len(chosen) != 1:
        what = f"{len(chosen)} GGUF files with {given} in their names" if chosen else f"no GGUF file {given}"
        there = ", ".join((chosen or names)[:8]) or "none at all"
        raise ModelError(f"the model has {what}; there are {there}: give one as ORG/NAME/FILE")
    split = SPLIT.fullmatch(chosen[0])
    if split is None:
        return [file for file in files if file.name == chosen[0]]
    parts = [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1)]
    found = {file.name: file for file in files}
    if missing := [name for name in parts if name not in found]:
        raise ModelError(f"the model lacks {missing[0]}, a part of {chosen[0]}; take another file of it")
    return [found[name] for name in parts]
