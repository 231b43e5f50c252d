"""The side of a server with --language-only: has encoder servers encode what requests show.

A file's input goes to one of --encoder-urls, and the rows that come back take its place (MediaInput.values);
ranks read them in place of an encoder's. Equal files are encoded once while their rows are kept here.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from urllib.parse import urlsplit

import anyio
import numpy as np
from anyio import CapacityLimiter
from msgspec import Struct, structs
from msgspec.msgpack import Decoder

from runtime import log
from runtime.errors import InternalFault, LinkError, RequestError, StartError, Unavailable
from runtime.messages.media import MediaInput
from runtime.messages.transfer import EncodeAsk, Encoded, Refused, Waiting
from runtime.transfer.wire import MOVES, Wire, connect

LOG = log.get("encoders")
KEPT_BYTES = 256 << 20
MAX_ASKED = 64  # files that are encoded at once
IDLE_WIRES = 8  # of one encoder server
ANSWERS = Decoder(Encoded | Refused | Waiting)
FORMS = "http://HOST:PORT or HOST:PORT"


class Address(Struct, frozen=True):
    """Where an encoder server listens (--disaggregation-bootstrap-port)."""

    host: str
    port: int


def parse_address(url: str) -> Address:
    """Raises StartError."""
    try:
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        if parts.hostname and parts.port and not parts.username and parts.path in ("", "/"):
            return Address(parts.hostname, parts.port)
    except ValueError:
        pass
    raise StartError(
        f"--encoder-urls {url}: give each as {FORMS}, with the --disaggregation-bootstrap-port of the "
        "encoder server"
    )


class Encoders:
    """The encoder servers, which take turns. One that fails is passed over while another one answers."""

    def __init__(self, addresses: Sequence[Address], key: bytes, identity: bytes, width: int) -> None:
        """`key`: the secret of all servers; `identity`: of the encoder and its weights; `width`: numbers of a
        row."""
        self._addresses = list(addresses)
        self._key, self._identity, self._width = key, identity, width
        self._threads = CapacityLimiter(MOVES)
        self._asked = CapacityLimiter(MAX_ASKED)
        self._idle: defaultdict[Address, list[Wire]] = defaultdict(list)
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()  # rows by digest
        self._kept_bytes = 0

    async def encode(self, media: Sequence[MediaInput]) -> tuple[MediaInput, ...]:
        """`media` with what an encoder server made of each file, float32 [rows, width], in place of its
        values. Raises Unavailable where no server answers, InternalFault for unexpected errors."""
        rows: dict[bytes, np.ndarray] = {}

        async def one(given: MediaInput) -> None:
            rows[given.digest] = await self._rows(given)

        try:
            async with anyio.create_task_group() as tasks:
                for given in {one.digest: one for one in media}.values():
                    tasks.start_soon(one, given)
        except ExceptionGroup as group:
            first = group.exceptions[0]
            if isinstance(first, RequestError):
                raise first from None
            LOG.exception("files could not be encoded", exc_info=True)
            raise InternalFault("images could not be encoded; the server's log has the details") from None
        return tuple([structs.replace(one, values=rows[one.digest]) for one in media])

    def close(self) -> None:
        """Ends all connections."""
        for wires in self._idle.values():
            for wire in wires:
                wire.close()
        self._idle.clear()

    async def _rows(self, given: MediaInput) -> np.ndarray:
        if (kept := self._kept.get(given.digest)) is not None:
            self._kept.move_to_end(given.digest)
            return kept
        self._addresses.append(self._addresses.pop(0))
        for address in list(self._addresses):
            try:
                async with self._asked:
                    rows = await self._ask(address, given)
            except (LinkError, OSError) as error:
                server = f"{address.host}:{address.port}"
                LOG.warning("an encoder server failed", server=server, reason=str(error))
                continue
            self._keep(given.digest, rows)
            return rows
        raise Unavailable("no encoder server encodes now; try again later")

    async def _ask(self, address: Address, given: MediaInput) -> np.ndarray:
        """Raises LinkError."""
        while self._idle[address]:
            wire = self._idle[address].pop()
            try:
                return await self._ask_over(wire, address, given)
            except LinkError as error:  # it may have ended since
                LOG.debug("a connection has ended", server=address.host, reason=str(error))
        wire = await connect(address.host, address.port, self._key, self._threads)
        return await self._ask_over(wire, address, given)

    async def _ask_over(self, wire: Wire, address: Address, given: MediaInput) -> np.ndarray:
        num_rows = len(given.positions)
        values = np.ascontiguousarray(given.values, np.float32)
        ask = EncodeAsk(self._identity, values.shape, given.grid, num_rows)
        try:
            view = values.data.cast("B")
            await wire.send_pages(ask, [view])
            while isinstance(answer := await wire.receive(ANSWERS), Waiting):
                pass
            if isinstance(answer, Refused):
                raise LinkError(answer.reason)
            rows = np.empty((num_rows, self._width), np.float32)
            if (answer.num_rows, answer.width) != rows.shape:
                raise LinkError(f"{answer.num_rows} rows of {answer.width} came where {rows.shape} were due")
            view = rows.data.cast("B")
            await wire.receive_pages([view])
        except BaseException:
            wire.close()
            raise
        if len(self._idle[address]) < IDLE_WIRES:
            self._idle[address].append(wire)
        else:
            wire.close()
        return rows

    def _keep(self, digest: bytes, rows: np.ndarray) -> None:
        if rows.nbytes > KEPT_BYTES or digest in self._kept:
            return
        self._kept[digest] = rows
        self._kept_bytes += rows.nbytes
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
