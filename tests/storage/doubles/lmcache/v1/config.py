"""A double of `lmcache.v1.config`."""

import os
from pathlib import Path


class LMCacheEngineConfig:
    def __init__(self, text: str) -> None:
        self.text = text
        self.chunk_size, self.use_layerwise = 256, True

    @classmethod
    def from_env(cls) -> "LMCacheEngineConfig":
        return cls(os.environ.get("LMCACHE_LOCAL_CPU", ""))

    @classmethod
    def from_file(cls, file_path: str) -> "LMCacheEngineConfig":
        return cls(Path(file_path).read_text("utf-8"))
