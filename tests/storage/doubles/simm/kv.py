"""A double of SiMM's `simm.kv` (python/simm/kv of scitix/SiMM): stores of one cluster manager share
values."""

import ctypes
from typing import Any

FLAGS: dict[str, str] = {}
KNOWN = ("cm_primary_node_ip", "cm_primary_node_port", "clnt_thread_pool_size", "clnt_log_file")
MANAGERS: dict[str, dict[str, bytes]] = {}
FAILING: list[int] = []  # results of the next puts and gets


def set_flag(name: str, value: str) -> bool:
    FLAGS[name] = value
    return name in KNOWN


def register_mr(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


class BlockView:
    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    @classmethod
    def from_buffer(cls, buf_ptr: int, buf_size: int, mr_ext: tuple[int, int]) -> "BlockView":
        assert mr_ext == (buf_ptr, buf_size)
        return cls(buf_ptr, buf_size)


class Store:
    def __init__(self) -> None:
        address = f"{FLAGS['cm_primary_node_ip']}:{FLAGS['cm_primary_node_port']}"
        self.values = MANAGERS.setdefault(address, {})

    def mexists(self, keys: list[str]) -> list[bool]:
        return [key in self.values for key in keys]

    def mput(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        if FAILING:
            return [FAILING.pop()]
        for key, block in zip(keys, blocks, strict=True):
            self.values[key] = ctypes.string_at(block.address, block.size)
        return [0] * len(keys)

    def mget(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        if FAILING:
            return [FAILING.pop()]
        results = []
        for key, block in zip(keys, blocks, strict=True):
            data = self.values.get(key)
            if data is not None:
                ctypes.memmove(block.address, data, min(len(data), block.size))
            results.append(-1 if data is None else len(data))
        return results

    def delete(self, key: str) -> int:
        return 0 if self.values.pop(key, None) is not None else -1
