"""A double of EIC's Python client, after its public users: SGLang's EICStorage and AIBrix's EICConnector.
Clients of one endpoint share their values; memory that is said to be registered must be."""

import ctypes
from enum import Enum

SERVICES: dict[str, dict[tuple[str, str], bytes]] = {"here:1": {}}


class StatusCode(Enum):
    SUCCESS = 0
    FAILED = 1
    PARTIAL_FAILED = 2
    NOT_EXIST = 3


class MemoryType(Enum):
    MEMORY_DEFAULT = 0
    MEMORY_CUDA = 1


class LogLevel:
    def __init__(self, level: int) -> None:
        assert 0 <= level < 6


class TransportType:
    def __init__(self, kind: int) -> None:
        assert kind in (0, 1, 2, 3)


class StringVector(list[str]):
    pass


class IOBuffers(list[tuple[int, int, bool]]):
    def append(self, *buffer: int) -> None:  # type: ignore[override]
        address, size, is_registered = buffer
        super().append((address, size, bool(is_registered)))


class Options:
    ns = ""


class InitOption(Options):
    pass


class MemoryInfo(Options):
    pass


class SetOption(Options):
    ttl_second = 0


class GetOption(Options):
    pass


class ExistOption(Options):
    pass


class DelOption(Options):
    pass


class Outcome:
    def __init__(self, codes: list[StatusCode]) -> None:
        self.status_codes = codes


class Client:
    fails = False

    def init(self, instance_id: str, endpoint: str, option: InitOption) -> int:
        assert isinstance(option.transport_type, TransportType) and isinstance(option.log_level, LogLevel)
        self.values = SERVICES.get(endpoint, {})
        self.registered: dict[int, int] = {}
        return 0 if endpoint in SERVICES else -1

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        assert info.type is MemoryType.MEMORY_DEFAULT
        self.registered |= {address: size for address, size, _ in buffers}
        return not self.fails

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        found = [(option.ns, key) in self.values for key in keys]
        codes = [StatusCode.SUCCESS if one else StatusCode.NOT_EXIST for one in found]
        return (StatusCode.SUCCESS if all(found) else StatusCode.PARTIAL_FAILED), Outcome(codes)

    def mset(self, keys: StringVector, values: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        assert option.ttl_second == -1
        if self.fails:
            return StatusCode.FAILED, Outcome([StatusCode.FAILED])
        for key, (address, size, is_registered) in zip(keys, values, strict=True):
            assert not is_registered or self.registered[address] >= size
            self.values[option.ns, key] = ctypes.string_at(address, size)
        return StatusCode.SUCCESS, Outcome([StatusCode.SUCCESS] * len(keys))

    def mget(
        self, keys: StringVector, option: GetOption, values: IOBuffers
    ) -> tuple[StatusCode, IOBuffers, Outcome]:
        codes = []
        for key, (address, size, _) in zip(keys, values, strict=True):
            data = self.values.get((option.ns, key))
            if data is None or self.fails:
                codes.append(StatusCode.NOT_EXIST if data is None else StatusCode.FAILED)
                continue
            assert self.registered[address] >= size == len(data)
            ctypes.memmove(address, data, size)
            codes.append(StatusCode.SUCCESS)
        whole = all(code is StatusCode.SUCCESS for code in codes)
        return (StatusCode.SUCCESS if whole else StatusCode.PARTIAL_FAILED), values, Outcome(codes)

    def mdel(self, keys: StringVector, option: DelOption) -> StatusCode:
        for key in keys:
            self.values.pop((option.ns, key), None)
        return StatusCode.SUCCESS
