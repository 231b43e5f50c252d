"""Doubles of the libraries that read other servers' memory, after their documentation: in one process, with
the checks that matter. Memory must be registered on both sides, and a server must be known."""

import ctypes
import json
from typing import Any

ENGINES: dict[str, "Double"] = {}


class Double:
    """`mooncake.engine.TransferEngine` (docs/source/python-api-reference/transfer-engine.md) and
    `memfabric_hybrid.TransferEngine` 1.3.0, which begin otherwise."""

    calls: list[tuple[Any, ...]] = []  # of `initialize`, by all

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.num_reads = 0
        self.session = ""

    def initialize(self, first: str, second: str, third: str, fourth: str | int) -> int:
        """mooncake: local_hostname, metadata_server, protocol, device_name. memfabric: store_url,
        session_id, role, device_id."""
        type(self).calls.append((first, second, third, fourth))
        is_mooncake = second == "P2PHANDSHAKE"
        self.session = f"{first}:{self.get_rpc_port()}" if is_mooncake else second
        if not is_mooncake and third not in ("Prefill", "Decode"):
            return -1
        ENGINES[self.session] = self
        return 0

    def get_rpc_port(self) -> int:
        return 15000 + id(self) % 1000

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        if buffer_addr in self.memory:
            return -1
        self.memory[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        return 0 if self.memory.pop(buffer_addr, 0) else -1

    def has(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + n for begin, n in self.memory.items())

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: list[int], peer_addresses: list[int], lengths: list[int]
    ) -> int:
        other = ENGINES.get(target_hostname)
        if other is None:
            return -1
        for local, remote, size in zip(buffers, peer_addresses, lengths, strict=True):
            if not self.has(local, size) or not other.has(remote, size):
                return -1
            ctypes.memmove(local, remote, size)
        self.num_reads += 1
        return 0


AGENTS: dict[str, "nixl_agent"] = {}


class nixl_agent:
    """`nixl_agent` of NIXL's Python API 1.5."""

    def __init__(self, name: str) -> None:
        self.name, self.memory, self.known = name, dict[int, int](), dict[str, dict[int, int]]()
        self.handles: dict[int, str] = {}
        self.num_reads = 0
        AGENTS[name] = self

    def register_memory(self, memory: list[tuple[int, int, int, str]], mem_type: str) -> list[int]:
        assert mem_type == "DRAM"
        self.memory |= {address: size for address, size, _, _ in memory}
        return [address for address, *_ in memory]

    def deregister_memory(self, descriptors: list[int]) -> None:
        for address in descriptors:
            del self.memory[address]

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, list(self.memory.items())]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, memory = json.loads(metadata)
        self.known[name] = dict(memory)
        return name.encode()

    def remove_remote_agent(self, agent: bytes) -> None:
        del self.known[agent.decode()]

    def get_xfer_descs(self, memory: list[tuple[int, int, int]], mem_type: str) -> Any:
        assert mem_type == "DRAM" and all(device == 0 for *_, device in memory)
        return memory

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: bytes) -> int:
        assert operation == "READ"
        theirs = self.known[agent.decode()]
        for (own, size, _), (other, other_size, _) in zip(local, remote, strict=True):
            for address, memory in ((own, self.memory), (other, theirs)):
                if not any(begin <= address and address + size <= begin + n for begin, n in memory.items()):
                    raise RuntimeError("nixlNotFoundError")
            assert size == other_size
            ctypes.memmove(own, other, size)
        self.num_reads += 1
        handle = len(self.handles)
        self.handles[handle] = "PROC"
        return handle

    def transfer(self, handle: int) -> str:
        return self.handles[handle]

    def check_xfer_state(self, handle: int) -> str:
        self.handles[handle] = "DONE" if self.name in AGENTS else "ERR"
        return self.handles[handle]

    def release_xfer_handle(self, handle: int) -> None:
        self.handles[handle] = "released"
