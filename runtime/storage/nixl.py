"""Records in files that NIXL's plugins for storage read and write: GPUDirect Storage, 3FS, or plain POSIX.

    --hicache-storage-backend nixl
    --hicache-storage-backend-extra-config '{"dir": "/fast/disk/pages", "plugin": "GDS_MT"}'

A record is a file, as in files.py, which opens, renames and evicts them. Their bytes go through an agent of
NIXL, as its Python API describes (`nixl_agent`: register_memory, initialize_xfer, transfer).
"""

import importlib.util
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import structs

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import PACKAGES, RecordBuffer, ThreadBuffers, import_store
from runtime.storage.files import FileBackend
from runtime.storage.nixl_transfer import finish_transfer
from runtime.storage.settings import NIXL_PLUGINS, NixlSettings

FLAG = "--hicache-storage-backend nixl"
WAIT_S = 60.0  # for one record


class Agent(Protocol):
    """The methods of `nixl_agent` that are used here."""

    name: str

    def get_plugin_list(self) -> list[str]:
        """-> plugins that are installed"""
        ...

    def create_backend(self, backend: str, initParams: Mapping[str, str], /) -> None:
        """Starts a plugin."""
        ...

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object:
        """Makes memory known, each: address, bytes, device, note; or files, each: offset, bytes, descriptor,
        note."""
        ...

    def deregister_memory(self, dereg_list: object) -> None:
        """Ends it."""
        ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object:
        """Parts of memory or of files, each: address or offset, bytes, device or descriptor."""
        ...

    def initialize_xfer(self, operation: str, local: object, remote: object, remote_agent: str) -> object:
        """-> a handle"""
        ...

    def transfer(self, handle: object) -> str:
        """Begins. -> DONE, PROC or ERR"""
        ...

    def check_xfer_state(self, handle: object) -> str:
        """-> DONE, PROC or ERR"""
        ...

    def release_xfer_handle(self, handle: object) -> None:
        """Frees a handle; ends its transfer."""
        ...


class NixlFiles:
    """FileIO through an agent. Its calls are made one at a time; transfers run beside each other."""

    def __init__(self, agent: Agent, num_bytes: int) -> None:
        """`num_bytes`: of the largest file."""
        self._agent = agent
        self._lock = threading.Lock()
        self._buffers = ThreadBuffers(num_bytes, self._register)

    def read(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.read."""
        buffer, size = self._buffers.own(), sum(part.nbytes for part in buffers)
        self._run("READ", file, buffer, size)
        buffer.scatter(buffers)
        return size

    def write(self, file: int, buffers: Sequence[memoryview]) -> int:
        """See FileIO.write."""
        buffer, size = self._buffers.own(), sum(part.nbytes for part in buffers)
        buffer.gather(buffers)
        self._run("WRITE", file, buffer, size)
        return size

    def _run(self, operation: str, file: int, buffer: RecordBuffer, size: int) -> None:
        """Raises OSError."""
        with self._lock:
            registered = self._agent.register_memory([(0, size, file, "")], "FILE")
        try:
            state = self._transfer(operation, file, buffer, size)
        finally:
            with self._lock:
                self._agent.deregister_memory(registered)
        if state != "DONE":
            raise OSError(f"NIXL could not move a record ({operation}, {state})")

    def _transfer(self, operation: str, file: int, buffer: RecordBuffer, size: int) -> str:
        agent = self._agent
        with self._lock:
            memory = agent.get_xfer_descs([(buffer.address, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(0, size, file)], "FILE")
            handle = agent.initialize_xfer(operation, memory, there, agent.name)
            state = agent.transfer(handle)
        return finish_transfer(agent, self._lock, handle, state, WAIT_S)

    def _register(self, address: int, size: int) -> None:
        with self._lock:
            self._agent.register_memory([(address, size, 0, "")], "DRAM")


def open_nixl(config: BackendConfig) -> FileBackend:
    """Raises StartError without the package or the plugin."""
    settings = msgspec.convert(config.settings, NixlSettings)  # checked with the options
    builds = PACKAGES["nixl"].modules
    found = [name for name in builds if importlib.util.find_spec(name) is not None]
    module = import_store(found[0] if found else builds[0], "nixl")
    try:
        agent: Agent = module.nixl_agent(
            f"runtime-{secrets.token_hex(8)}", module.nixl_agent_config(backends=[])
        )
        there = agent.get_plugin_list()
        plugin: str = settings.plugin
        if plugin == "auto":
            plugin = next((name for name in NIXL_PLUGINS if name in there), NIXL_PLUGINS[-1])
        if plugin not in there:
            raise StartError(
                f"{FLAG}: this build of NIXL has no plugin {plugin}, but {', '.join(there)}; correct "
                '"plugin" in --hicache-storage-backend-extra-config'
            )
        agent.create_backend(plugin, settings.params)
    except StartError:
        raise
    except Exception as error:  # the library's own classes
        raise StartError(f"{FLAG}: the agent can't start ({type(error).__name__}: {error})") from None
    own = {"max_bytes": settings.max_bytes} | ({"dir": settings.dir} if settings.dir is not None else {})
    return FileBackend(structs.replace(config, settings=own), NixlFiles(agent, config.record_bytes))
