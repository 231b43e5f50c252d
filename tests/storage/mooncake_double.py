"""A double of `mooncake.store.MooncakeDistributedStore`, after docs/source/python-api-reference/
mooncake-store.md of kvcache-ai/Mooncake: stores with one master share their objects."""

import ctypes
import re
from typing import Any

MASTERS: dict[str, dict[str, bytes]] = {}


class MooncakeDistributedStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.registered: dict[int, int] = {}
        self.fails = False

    def setup(self, *arguments: Any) -> int:
        hostname, metadata, segment, buffer, protocol, devices, master = arguments
        assert all(isinstance(one, str) for one in (hostname, metadata, protocol, devices))
        assert isinstance(segment, int) and isinstance(buffer, int)
        if master not in MASTERS:
            return -1
        self.objects = MASTERS[master]
        return 0

    def put_parts(self, key: str, *parts: memoryview) -> int:
        if self.fails:
            return -200  # NO_AVAILABLE_HANDLE
        self.objects.setdefault(key, b"".join(parts))
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered[buffer_ptr] = size
        return -1 if self.fails else 0

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        assert self.registered[buffer_ptr] >= size
        if self.fails:
            return -800  # TRANSFER_FAIL
        if key not in self.objects:
            return -704  # OBJECT_NOT_FOUND
        data = self.objects[key]
        ctypes.memmove(buffer_ptr, data, min(len(data), size))
        return len(data)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        found = [key for key in self.objects if re.search(regex_pattern, key)]
        for key in found:
            del self.objects[key]
        return -1 if self.fails else len(found)

    def close(self) -> int:
        return 0
