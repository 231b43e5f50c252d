"""Records in EIC, the elastic instant cache of Volcano Engine, through its Python client `eic`.

    --hicache-storage-backend eic
    --hicache-storage-backend-extra-config '{"remote_url": "eic://10.0.0.1:12500", "eic_instance_id": "a"}'

The client comes with the service. Its calls are those that the public users of it make: EICStorage of SGLang
(mem_cache/storage/eic) and EICConnector of AIBrix (l2/connectors/eic). Settings have SGLang's names.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig
from runtime.storage.buffers import RecordBuffer, ThreadBuffers, import_store
from runtime.storage.settings import EicSettings

BATCH = 1024  # keys of one call
FOREVER = -1  # seconds that a record lives


class Outcome(Protocol):
    """Results of a call, for each key."""

    status_codes: Sequence[object]


class Client(Protocol):
    """The methods of `eic.Client` that are used here. Vectors and options are classes of the module."""

    def init(self, instance_id: str, endpoint: str, option: object) -> int:
        """Connects. -> 0, or an error"""
        ...

    def register_memory(self, buffers: object, info: object) -> bool:
        """Lets the network read and write memory."""
        ...

    def mexist(self, keys: object, option: object) -> tuple[object, Outcome]:
        """-> status, and that of each key"""
        ...

    def mset(self, keys: object, values: object, option: object) -> tuple[object, Outcome]:
        """Stores values."""
        ...

    def mget(self, keys: object, option: object, values: object) -> tuple[object, object, Outcome]:
        """Reads values into memory. -> status, values, and the status of each key"""
        ...

    def mdel(self, keys: object, option: object) -> object:
        """Deletes values."""
        ...


class EicBackend:
    """See Backend."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises StartError."""
        settings = msgspec.convert(config.settings, EicSettings)  # checked with the options
        self._module = import_store("eic", "eic")
        self._client = self._connect(settings)
        self._namespace = settings.eic_namespace
        self._prefix = f"runtime/{config.identity.hex()}/"
        self._buffers = ThreadBuffers(config.record_bytes, self._register)

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains. Raises OSError where the service fails."""
        for at in range(0, len(keys), BATCH):
            batch = keys[at : at + BATCH]
            status, outcome = self._client.mexist(self._keys(batch), self._option("ExistOption"))
            codes = outcome.status_codes
            if status != self._module.StatusCode.SUCCESS and len(codes) < len(batch):
                raise OSError(f"EIC could not look records up (status {status})")
            for number, code in enumerate(codes):
                if code != self._module.StatusCode.SUCCESS:
                    return at + number
        return len(keys)

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read. Raises OSError where the service fails."""
        buffer = self._buffers.own()
        status, _, outcome = self._client.mget(
            self._keys([key]), self._option("GetOption"), self._values(buffer)
        )
        if status != self._module.StatusCode.SUCCESS or self._failure(outcome) is not None:
            if not self.contains([key]):
                return False
            raise OSError(f"EIC could not read a record (status {status})")
        buffer.scatter(buffers)
        return True

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write. Raises OSError where the service fails."""
        buffer = self._buffers.own()
        buffer.gather(buffers)
        option = self._option("SetOption")
        option.ttl_second = FOREVER
        status, outcome = self._client.mset(self._keys([key]), self._values(buffer), option)
        if status != self._module.StatusCode.SUCCESS or self._failure(outcome) is not None:
            raise OSError(f"EIC could not store a record (status {status}, {self._failure(outcome)})")

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._client.mdel(self._keys([key]), self._option("DelOption"))

    def clear(self) -> int:
        """See Backend.clear. Raises OSError: the client cannot list records."""
        raise OSError("EIC's client cannot list records; delete them in the service, or change eic_namespace")

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats: the service counts for all its clients together."""
        return {}

    def close(self) -> None:
        """See Backend.close: the client ends with its last reference."""
        del self._client

    def _connect(self, settings: EicSettings) -> Client:
        option = self._module.InitOption()
        option.log_dir = settings.eic_log_dir
        option.log_level = self._module.LogLevel(settings.eic_log_level)
        option.transport_type = self._module.TransportType(settings.eic_trans_type)
        option.flag_file = settings.eic_flag_file
        client: Client = self._module.Client()
        endpoint = settings.remote_url.removeprefix("eic://")
        if status := client.init(settings.eic_instance_id, endpoint, option):
            raise StartError(
                f"--hicache-storage-backend eic: no service at {endpoint} (status {status}); correct "
                '"remote_url" or "eic_instance_id" in --hicache-storage-backend-extra-config'
            )
        return client

    def _register(self, address: int, size: int) -> None:
        """Raises OSError."""
        values, info = self._module.IOBuffers(), self._module.MemoryInfo()
        info.type = self._module.MemoryType.MEMORY_DEFAULT
        values.append(address, size, True)
        if not self._client.register_memory(values, info):
            raise OSError(f"EIC could not register {size} bytes")

    def _keys(self, keys: Sequence[bytes]) -> object:
        vector = self._module.StringVector()
        for key in keys:
            vector.append(self._prefix + key.hex())
        return vector

    def _values(self, buffer: RecordBuffer) -> object:
        values = self._module.IOBuffers()
        values.append(buffer.address, len(buffer.view), True)
        return values

    def _option(self, name: str) -> "Option":
        option: Option = getattr(self._module, name)()
        if hasattr(option, "ns"):  # the public users of DelOption set none
            option.ns = self._namespace
        return option

    def _failure(self, outcome: Outcome) -> object | None:
        """The first status that is no success."""
        success = self._module.StatusCode.SUCCESS
        return next((code for code in outcome.status_codes if code != success), None)


class Option(Protocol):
    """Options of one call."""

    ns: str
    ttl_second: int
