"""From what a client named to decoded arrays."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from time import monotonic

import anyio
import numpy as np
from anyio.to_thread import run_sync
from msgspec import structs

from runtime.errors import InvalidRequest, RequestError, Unavailable
from runtime.gil import giving_way
from runtime.media.budget import ByteBudget
from runtime.media.decode_messages import TextPlace
from runtime.media.decoders import Decoders
from runtime.media.fetch import Fetcher
from runtime.media.local_file import open_local
from runtime.media.settings import MAX_FILE_BYTES, MAX_FILES, MAX_VALUE_BYTES, MediaSettings
from runtime.media.spool import Spool, check_base64, spool, write_base64
from runtime.media.url import data_of, scheme_of
from runtime.media_kind import NAMES
from runtime.messages.media import Media, MediaKind, MediaLoad, MediaSource


class MediaLoader:
    """Fetches and decodes the files of requests, several at once, within the operator's limits."""

    def __init__(
        self,
        settings: MediaSettings,
        environment: Mapping[str, str],
        fetcher: Callable[[frozenset[str]], Fetcher] = Fetcher,
    ) -> None:
        """`environment`: of the process that decodes."""
        self._settings = settings
        self._fetcher = fetcher(settings.domains)
        self._fetches = anyio.CapacityLimiter(settings.max_fetches)
        self._places = anyio.CapacityLimiter(settings.max_decoders)
        self._decoders = Decoders(settings.decode, environment)
        self._memory = ByteBudget(settings.max_host_bytes)

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """The decoded files, in the order of `sources`; each file that is named twice is loaded twice. Raises
        InvalidRequest, which names the file; Forbidden for file: URLs where none are allowed; Unavailable
        where the limit of time passed before a file had its turn; InternalFault."""
        check_counts(sources, self._settings.max_files)
        loads = [_Load(source) for source in sources]
        with anyio.move_on_after(self._settings.timeout_s) as limit:
            async with anyio.create_task_group() as tasks:
                for one in loads:
                    tasks.start_soon(self._run, one, loads, tasks.cancel_scope)
        for one in loads:  # of several errors the first in the prompt
            if one.error is not None:
                raise one.error
        if late := [one for one in loads if one.media is None]:
            assert limit.cancelled_caught, "a file that is not loaded has an error, or the time is over"
            raise self._too_late(late)
        return [one.media for one in loads if one.media is not None]

    @property
    def spare_bytes(self) -> int:
        """Bytes of host memory that may be kept at all times: a quarter of what the largest file leaves."""
        return max(self._memory.max_bytes - self._settings.decode.max_value_bytes, 0) // 4

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raises InvalidRequest where a request has too many files."""
        check_counts(sources, self._settings.max_files)

    def hold(self, values: np.ndarray) -> None:
        """Counts an array that a file was prepared to as memory in use, until it is gone. Thread-safe."""
        self._memory.hold(values)

    async def aclose(self) -> None:
        """Ends the processes."""
        await self._decoders.aclose()

    async def _run(self, one: "_Load", loads: Sequence["_Load"], rest: anyio.CancelScope) -> None:
        """Loads one of the files of a request. An error ends the others."""
        try:
            async with self._fetches:
                one.is_waiting = False
                one.media = await self._load(one)
            _check_size(one.source, loads)
        except RequestError as error:
            one.error = error
            rest.cancel()

    async def _load(self, one: "_Load") -> Media:
        source, max_bytes = one.source, MAX_FILE_BYTES[one.source.kind]
        if source.decoded is not None:
            return source.decoded
        begin_s = monotonic()
        async with AsyncExitStack() as stack:
            fd, num_bytes, text = await self._fetched(source, stack, max_bytes)
            fetched_s, one.is_waiting = monotonic(), True
            async with self._places:
                decode_s = monotonic()
                media, sound = await self._decode(one, source, fd, text), None
                if source.has_sound:
                    of_sound = structs.replace(source, kind=MediaKind.AUDIO)
                    sound = await self._decode(one, of_sound, fd, text)
                load = MediaLoad(num_bytes, begin_s, fetched_s, decode_s, monotonic())
                return structs.replace(media, sound=sound, loaded=load)

    async def _fetched(
        self, source: MediaSource, stack: AsyncExitStack, max_bytes: int
    ) -> tuple[int, int, TextPlace | None]:
        """-> a descriptor of the file, which is open until `stack` ends; its bytes; where it stands as base64
        in what was opened"""
        if scheme_of(source.url) == "file":
            file = await run_sync(open_local, source.url, source.param, self._settings.folder, max_bytes)
            fd = stack.enter_context(file).fileno()
            return fd, os.fstat(fd).st_size, None
        if (encoded := source.encoded) is not None:
            if source.url:
                data_of(source.url, source.param)
            check_base64(encoded.num_bytes, source.param, max_bytes)
            return encoded.memory.fd, encoded.num_bytes, TextPlace(encoded.begin, encoded.end)
        out = stack.enter_context(spool(source.param, max_bytes))
        is_base64 = await self._collect(source, out)
        return out.fd, out.num_bytes, TextPlace(0, out.num_bytes) if is_base64 else None

    async def _decode(self, one: "_Load", source: MediaSource, fd: int, text: TextPlace | None) -> Media:
        """Decodes the file when there is memory for the largest one."""
        most = self._settings.decode.max_value_bytes
        one.is_waiting = one.waits_for_memory = True
        await self._memory.take(most)
        try:
            one.is_waiting = one.waits_for_memory = False
            media = await self._decoders.decode(source, fd, text, self._settings.timeout_s)
            self._memory.hold(media.values)
        finally:
            self._memory.give_back(most)
        return media

    async def _collect(self, source: MediaSource, out: Spool) -> bool:
        """Writes the file to `out`. -> whether it is in base64"""
        if source.base64:
            await run_sync(giving_way, write_base64, out, source.base64, 0)
            return True
        if not source.url:
            await run_sync(out.write, source.data)
            return False
        match scheme_of(source.url):
            case "data":
                start = data_of(source.url, source.param)
                await run_sync(giving_way, write_base64, out, source.url, start)
                return True
            case "http" | "https":
                await self._fetcher.fetch(source.url, out)
                return False
        raise InvalidRequest(
            f"{source.param} must be a URL of data:, http:, https: or file:", param=source.param
        )

    def _too_late(self, late: Sequence["_Load"]) -> RequestError:
        limit_s, param = self._settings.timeout_s, late[0].source.param
        if any(one.waits_for_memory for one in late):
            return Unavailable(
                f"{param}: files of other requests have the host memory that --mm-host-memory-gb allows; "
                "send this request again",
                param=param,
            )
        if all(one.is_waiting for one in late):
            return Unavailable(
                f"{param}: the server has too many files to load at the moment; send this request again",
                param=param,
            )
        slow = next(one for one in late if not one.is_waiting)
        param = slow.source.param
        return InvalidRequest(
            f"{param}: the file was not loaded within {limit_s:g} s (--mm-per-request-timeout); send a "
            "smaller one, or from a faster server",
            param=param,
        )


class _Load:
    """One file that is being loaded."""

    def __init__(self, source: MediaSource) -> None:
        self.source = source
        self.is_waiting = True  # for its turn, while others are fetched or decoded
        self.waits_for_memory = False
        self.media: Media | None = None
        self.error: RequestError | None = None


def check_counts(sources: Sequence[MediaSource], max_files: Mapping[MediaKind, int]) -> None:
    """Raises InvalidRequest, which names the first file too many of its kind."""
    counts: Counter[MediaKind] = Counter()
    for source in sources:
        counts[source.kind] += 1
        if counts[source.kind] > (most := max_files.get(source.kind, MAX_FILES)):
            raise InvalidRequest(
                f"{source.param}: a request may have {most} {NAMES[source.kind]} here "
                "(--limit-mm-data-per-request)",
                param=source.param,
            )


def _check_size(source: MediaSource, loads: Sequence[_Load]) -> None:
    num_bytes = sum([one.media.num_bytes for one in loads if one.media is not None])
    if num_bytes > MAX_VALUE_BYTES:
        raise InvalidRequest(
            f"{source.param}: the files of this request have over {MAX_VALUE_BYTES} bytes when they are "
            "decoded; send fewer or smaller ones",
            param=source.param,
        )
