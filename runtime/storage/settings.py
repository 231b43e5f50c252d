"""--hicache-storage-backend-extra-config: settings of the storage tier and of its backends."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.json_value import JsonDict, JsonValue

# SGLang's variable, so that its users need not set another one
DIR_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"

Bytes = A[int, Meta(ge=1)]
Seconds = A[float, Meta(ge=0)]


class TierSettings(Struct, frozen=True, kw_only=True):
    """Settings of the tier, for any backend."""

    # fewest tokens in storage for which a fetch is worth it
    prefetch_threshold: A[int, Meta(ge=1)] = 256
    prefetch_timeout_base: Seconds = 1.0  # time limit of --hicache-storage-prefetch-policy timeout
    prefetch_timeout_per_ki_token: Seconds = 0.25  # added to it for each 1024 tokens to be fetched
    num_threads: A[int, Meta(ge=1, le=64)] = 4  # threads that read and write at the same time
    max_queued_bytes: Bytes = 1 << 30  # pages that wait to be written; further ones are dropped
    # the name of the weights, for copies of them whose files have other dates (identity.py)
    model: str | None = None


class FileSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the file backend."""

    dir: str | None = None  # None: runtime/pages in the user's cache directory
    max_bytes: Bytes = 64 << 30  # size of all pages in the directory

    def folder(self, environment: Mapping[str, str] = os.environ) -> Path:
        """The directory: `dir`, SGLang's variable, or the user's cache directory."""
        if self.dir is not None:
            return Path(self.dir).expanduser()
        if variable := environment.get(DIR_VARIABLE):
            return Path(variable).expanduser()
        return cache_folder(environment) / "pages"


class MooncakeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the mooncake backend."""

    master_server_address: A[str, Meta(min_length=1)]  # HOST:PORT of mooncake_master
    local_hostname: str = "localhost"  # at which other clients of the store reach this server
    metadata_server: str = "P2PHANDSHAKE"  # none: clients tell each other what they have
    global_segment_size: A[int, Meta(ge=0)] = 4 << 30  # bytes of memory that this server lends the store
    local_buffer_size: A[int, Meta(ge=1 << 20)] = 64 << 20  # bytes for records on their way
    protocol: str = "tcp"  # or rdma
    device_name: str = ""  # network devices with RDMA, separated by commas


NIXL_PLUGINS = ("POSIX", "GDS_MT", "GDS", "3FS")  # those that write files, the first one first


class Hf3fsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the hf3fs backend."""

    dir: A[str, Meta(min_length=1)]  # on a mounted 3FS
    max_bytes: Bytes = 64 << 30  # size of all pages in the directory
    client_timeout: A[float, Meta(gt=0)] = 5.0  # seconds for one record


class NixlSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the nixl backend."""

    dir: str | None = None  # None: as for files
    max_bytes: Bytes = 64 << 30  # size of all pages in the directory
    plugin: Literal["auto", "POSIX", "GDS_MT", "GDS", "3FS"] = "auto"  # the first one that is installed
    params: dict[str, str] = {}  # of the plugin, as NIXL's documentation has them


class EicSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the eic backend, named as in SGLang's file for it."""

    remote_url: A[str, Meta(min_length=1)]  # eic://HOST:PORT
    eic_instance_id: A[str, Meta(min_length=1)]
    eic_namespace: str = ""
    eic_log_dir: str = "."
    eic_log_level: int = 2
    eic_trans_type: int = 3
    eic_flag_file: str | None = None


class SimmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the simm backend."""

    manager_address: A[str, Meta(pattern=r"^.+:[0-9]+$")]  # HOST:PORT of the cluster manager
    clnt_threadpool_size: A[int, Meta(ge=1)] = 10
    log_file: str | None = None  # None: SiMM's own place


class AibrixSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the aibrix backend: variables of the environment, AIBRIX_KV_CACHE_OL_*, as AIBrix's
    documentation has them."""

    environment: dict[A[str, Meta(pattern="^AIBRIX_[A-Z0-9_]+$")], str] = {}


class LmcacheSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of LMCache (--enable-lmcache)."""

    config_file: str | None = None  # None: LMCACHE_CONFIG_FILE, else the variables LMCACHE_*


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Our folder in this user's caches; for a user without a home, in the system's."""
    base = environment.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG specification has relative paths ignored
        return Path(base) / "runtime"
    try:
        return Path.home() / ".cache" / "runtime"
    except RuntimeError:
        return Path("/var/cache/runtime")


class PlugInSettings(Struct, frozen=True, kw_only=True):
    """Settings of the `dynamic` backend; the other fields go to the plug-in."""

    module: A[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]  # package.module:Class


OWN_SETTINGS: dict[str, type[Struct]] = {
    "file": FileSettings,
    "mooncake": MooncakeSettings,
    "hf3fs": Hf3fsSettings,
    "nixl": NixlSettings,
    "eic": EicSettings,
    "simm": SimmSettings,
    "aibrix": AibrixSettings,
    "lmcache": LmcacheSettings,
}
TIER_NAMES = frozenset(TierSettings.__struct_fields__)
PLUG_IN_NAMES = frozenset(PlugInSettings.__struct_fields__)


def tier_settings(config: Mapping[str, JsonValue] | None) -> TierSettings:
    """The tier's part of the configuration. Raises msgspec.ValidationError."""
    return msgspec.convert(_only(config, TIER_NAMES), TierSettings)


def backend_settings(config: Mapping[str, JsonValue] | None) -> JsonDict:
    """The backend's part of the configuration."""
    return {name: value for name, value in (config or {}).items() if name not in TIER_NAMES}


def problem(backend: str, config: Mapping[str, JsonValue] | None) -> str | None:
    """Why the configuration is not possible, as the end of a sentence; None: it is possible."""
    own = backend_settings(config)
    try:
        tier_settings(config)
        if backend == "dynamic":
            if "module" not in own:
                return 'names no plug-in; give "module": "package.module:Class"'
            msgspec.convert(_only(own, PLUG_IN_NAMES), PlugInSettings)
        else:
            msgspec.convert(own, OWN_SETTINGS[backend])
    except msgspec.ValidationError as error:
        known = sorted(
            TIER_NAMES
            | set(OWN_SETTINGS[backend].__struct_fields__ if backend in OWN_SETTINGS else PLUG_IN_NAMES)
        )
        return f"is not possible: {error}; it knows {', '.join(known)}"
    return None


def _only(config: Mapping[str, JsonValue] | None, names: frozenset[str]) -> JsonDict:
    return {name: value for name, value in (config or {}).items() if name in names}
