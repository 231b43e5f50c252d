"""A double of NIXL's agent with plugins for files, after its Python API 1.5. Memory and files must be
registered; transfers take a while."""

import ctypes
import os

PLUGINS = ["UCX", "POSIX"]
FAILING: list[str] = []  # states that come in place of DONE


class nixl_agent_config:
    def __init__(self, backends: list[str]) -> None:
        assert backends == []  # or UCX would be started


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name = name
        self.backends: dict[str, dict[str, str]] = {}
        self.registered: list[tuple[str, int, int]] = []
        self.handles: dict[int, tuple[str, int, int, int]] = {}

    def get_plugin_list(self) -> list[str]:
        return PLUGINS

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None:
        assert backend in PLUGINS
        self.backends[backend] = initParams

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> list[int]:
        assert self.backends and mem_type in ("DRAM", "FILE")
        at = [device if mem_type == "FILE" else address for address, _, device, _ in reg_list]
        self.registered += [(mem_type, one, row[1]) for one, row in zip(at, reg_list, strict=True)]
        return at

    def deregister_memory(self, dereg_list: list[int]) -> None:
        self.registered = [row for row in self.registered if row[0] == "DRAM" or row[1] not in dereg_list]

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> list[tuple[int, int]]:
        found = [(file if mem_type == "FILE" else address, size) for address, size, file in descs]
        assert all((mem_type, *one) in self.registered for one in found)
        return found

    def initialize_xfer(
        self, operation: str, local: list[tuple[int, int]], remote: list[tuple[int, int]], remote_agent: str
    ) -> int:
        assert operation in ("READ", "WRITE") and remote_agent == self.name and local[0][1] == remote[0][1]
        handle = len(self.handles)
        self.handles[handle] = (operation, *local[0], remote[0][0])
        return handle

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        if FAILING:
            return FAILING.pop(0)
        operation, address, size, file = self.handles[handle]
        memory = (ctypes.c_char * size).from_address(address)
        count = os.preadv(file, [memory], 0) if operation == "READ" else os.pwritev(file, [memory], 0)
        return "DONE" if count == size else "ERR"

    def release_xfer_handle(self, handle: int) -> None:
        assert handle in self.handles
