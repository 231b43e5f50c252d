"""--hicache-storage-backend-extra-config: what the tier and its backends can be told, as a strict Struct."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated as A
from typing import Any

import msgspec
from msgspec import Meta, Struct

DIR_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"  # where SGLang's users have said it already

Bytes = A[int, Meta(ge=1)]
Seconds = A[float, Meta(ge=0)]


class TierSettings(Struct, frozen=True, kw_only=True):
    """What the tier reads, whatever the backend."""

    # tokens that must be found in storage for a fetch to be worth it
    prefetch_threshold: A[int, Meta(ge=1)] = 256
    prefetch_timeout_base: Seconds = 1.0  # --hicache-storage-prefetch-policy timeout waits so long
    prefetch_timeout_per_ki_token: Seconds = 0.25  # and so much longer for each 1024 tokens to be fetched
    num_threads: A[int, Meta(ge=1, le=64)] = 4  # that read and write at once
    max_queued_bytes: Bytes = 1 << 30  # of pages that wait to be written; what comes on top is dropped
    # the name of the weights, for copies of them whose files have other dates (identity.py)
    model: str | None = None


class FileSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file backend reads."""

    dir: str | None = None  # None: runtime/pages in the user's cache directory
    max_bytes: Bytes = 64 << 30  # of all pages in the directory

    def folder(self, environment: Mapping[str, str] = os.environ) -> Path:
        if self.dir is not None:
            return Path(self.dir).expanduser()
        if said := environment.get(DIR_VARIABLE):
            return Path(said).expanduser()
        # relative ones are to be ignored, says the specification
        base = environment.get("XDG_CACHE_HOME", "")
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "runtime" / "pages"


class PlugInSettings(Struct, frozen=True, kw_only=True):
    """What `dynamic` reads; the rest goes to the plug-in."""

    module: A[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]  # package.module:Class


TIER_NAMES = frozenset(TierSettings.__struct_fields__)
PLUG_IN_NAMES = frozenset(PlugInSettings.__struct_fields__)


def tier_settings(said: Mapping[str, Any] | None) -> TierSettings:
    return msgspec.convert(_only(said, TIER_NAMES), TierSettings)


def backend_settings(said: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is left for the backend."""
    return {name: value for name, value in (said or {}).items() if name not in TIER_NAMES}


def problem(backend: str, said: Mapping[str, Any] | None) -> str | None:
    """What is wrong with the settings, without naming the flag; None when nothing is."""
    own = backend_settings(said)
    try:
        tier_settings(said)
        if backend == "dynamic":
            if "module" not in own:
                return 'names no plug-in; give "module": "package.module:Class"'
            msgspec.convert(_only(own, PLUG_IN_NAMES), PlugInSettings)
        else:
            msgspec.convert(own, FileSettings)
    except msgspec.ValidationError as error:
        known = sorted(
            TIER_NAMES | set(FileSettings.__struct_fields__ if backend == "file" else PLUG_IN_NAMES)
        )
        return f"is not possible: {error}; it knows {', '.join(known)}"
    return None


def _only(said: Mapping[str, Any] | None, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in (said or {}).items() if name in names}
