"""A server's part in disaggregation: what it listens on, and which half of a request is for it."""

from collections.abc import Iterable
from typing import Literal, NoReturn

from anyio.abc import TaskGroup
from msgspec import structs

from runtime import log
from runtime.errors import InvalidRequest, StartError, Unavailable
from runtime.messages.requests import GenerateRequest
from runtime.messages.transfer import Role, Transfer
from runtime.metrics import Metrics
from runtime.options.plan import Plan
from runtime.transfer.engines import ENGINES, Setup
from runtime.transfer.fetches import PageFetches
from runtime.transfer.key import HEADER, OPTION, ROOM_FIELD, SERVERS_KEY, check_bearer, check_proof, link_key
from runtime.transfer.rooms import Rooms
from runtime.transfer.service import PageService
from runtime.transfer.transports import FAKE, SHM, EngineTransport, SharedMemory, Transport

Mode = Literal["prefill", "decode"]


class Halves:
    """Rooms and pages of a server with --disaggregation-mode."""

    def __init__(
        self,
        mode: Mode,
        host: str,
        port: int | None,
        key: bytes,
        *,
        can_change: bool,
        transport: Transport | None = None,
    ) -> None:
        """`host` and `port`: where pages can be asked for; port None: they are made up. `can_change`: what is
        computed here lies in host memory, so that the other half could be this server's as well.
        `transport`: by which servers read each other's memory; None: bytes are sent."""
        self.rooms = Rooms()
        self.transport = transport
        self.service = PageService(self.rooms, link_key(key), transport)
        self.port: int | None = None  # at which pages can be asked for now
        self._mode: Mode = mode
        self._address = None if port is None else (host, port)
        self._key = key
        self._can_change = can_change
        self._tasks: TaskGroup | None = None  # from `start` on

    @property
    def link_key(self) -> bytes:
        """The secret by which servers know each other."""
        return link_key(self._key)

    async def start(self, tasks: TaskGroup) -> None:
        """Listens, if this server computes prompts for others. Raises StartError."""
        self._tasks = tasks
        if self._mode == "prefill":
            await self._listen(tasks)

    def close(self) -> None:
        """Ends reading of memory. For the owner, when nothing runs any more."""
        if self.transport is not None:
            self.transport.close()

    async def change(self, mode: Mode) -> Role:
        """Computes the other half of requests that come from now on; those that run end as they began. Raises
        InvalidRequest where that cannot be, Unavailable while the server starts."""
        if self._tasks is None:
            raise Unavailable("the server starts; try again later")
        if mode != self._mode:
            if not self._can_change:
                raise InvalidRequest(
                    "this server copies no pages to host memory, so none could be asked for; start it with "
                    "--disaggregation-decode-enable-offload-kvcache",
                    param="mode",
                )
            if mode == "prefill":
                try:
                    await self._listen(self._tasks)
                except StartError as error:
                    raise InvalidRequest(str(error), param="mode") from None
            self._mode = mode
        return Role(self._mode, self.port)

    async def _listen(self, tasks: TaskGroup) -> None:
        if self._address is not None and self.port is None:
            self.port = await tasks.start(self.service.run, *self._address)
            log.get("transfer").info("pages can be asked for", host=self._address[0], port=self.port)

    def report(self, metrics: Metrics, fetching: Iterable[PageFetches]) -> None:
        """Sets the metrics of pages that came and went; `fetching`: of each replica."""
        received = [one.received for one in fetching]
        sent = self.service.sent
        metrics.transfer_pages.values |= {"sent": sent.pages, "received": sum(one.pages for one in received)}
        metrics.transfer_bytes.values |= {"sent": sent.bytes, "received": sum(one.bytes for one in received)}
        metrics.transfer_refused.value = sent.refused
        metrics.transfer_fetches.value = sum(one.fetches for one in received)
        metrics.transfer_failures.value = sum(one.failures for one in received)
        metrics.transfer_wait_s.value = sum(one.wait_s for one in received)

    def take(self, request: GenerateRequest) -> GenerateRequest:
        """The half of a request that this server computes: of one whose answer another server gives, the
        prompt and one token. Raises Forbidden, InvalidRequest."""
        transfer = request.transfer
        assert transfer is not None
        if transfer.bearer is None:
            check_proof(self._key, transfer)
        else:  # the body's fields are the same for both halves
            check_bearer(self._key, transfer.bearer)
            transfer = Transfer(transfer.room, transfer.source if self._mode == "decode" else "")
            request = structs.replace(request, transfer=transfer)
        mode = "decode" if transfer.source else "prefill"
        if mode != self._mode:
            raise InvalidRequest(
                f"this half of a request is for a server with --disaggregation-mode {mode}, and this one has "
                f"{self._mode}; exchange them in the router's command line",
                param=HEADER,
            )
        if transfer.source:
            return request
        params = structs.replace(
            request.params,
            max_new_tokens=1,
            min_new_tokens=min(request.params.min_new_tokens, 1),
            n=1,
            constraint=None,
            thinking=None,
        )
        return structs.replace(request, params=params, prediction="")


def refuse(transfer: Transfer) -> NoReturn:
    """Raises InvalidRequest: the server has no halves."""
    field = HEADER if transfer.bearer is None else ROOM_FIELD
    name = f"the header {HEADER}" if transfer.bearer is None else ROOM_FIELD
    raise InvalidRequest(
        f"{name} is for servers with --disaggregation-mode and {OPTION}; leave it out, or start this one "
        "with them",
        param=field,
    )


def open_halves(plan: Plan) -> Halves | None:
    """The halves of a server with --disaggregation-mode; None: it has none. Raises StartError for a key that
    is missing."""
    mode = plan.disaggregation.disaggregation_mode
    if mode == "null":
        return None
    backend = plan.disaggregation.disaggregation_transfer_backend
    key = SERVERS_KEY.read(plan.disaggregation.disaggregation_key_file)
    return Halves(
        mode,
        plan.http.host,
        None if backend == FAKE else plan.disaggregation.disaggregation_bootstrap_port,
        key,
        transport=open_transport(plan, mode),
        can_change=mode == "prefill" or plan.disaggregation.disaggregation_decode_enable_offload_kvcache,
    )


def open_transport(plan: Plan, mode: Mode) -> Transport | None:
    """How the server reads the memory of others; None: it is sent bytes. Raises StartError for a library that
    is missing or can't start."""
    backend = plan.disaggregation.disaggregation_transfer_backend
    if backend == SHM:
        return SharedMemory()
    if (begin := ENGINES.get(backend)) is None:
        return None
    devices = plan.disaggregation.disaggregation_ib_device or ""
    return EngineTransport(backend, begin(Setup(plan.http.host, devices, mode, plan.parallel.base_gpu_id)))
