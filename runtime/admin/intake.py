"""The way of a request into the runtime: what is checked and added before the router takes it."""

from collections.abc import Callable

from msgspec import structs

from runtime.actors.open_requests import OpenRequests
from runtime.actors.router import Router
from runtime.admin.adapter_registry import AdapterRegistry, find_adapter
from runtime.admin.sessions import Sessions
from runtime.errors import InvalidRequest, Overloaded, Unavailable
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.tenants import Tenant
from runtime.metrics import Metrics
from runtime.metrics.request_records import Records
from runtime.models.config.pooling import Pooling
from runtime.options.plan import Plan
from runtime.service import State, check_task
from runtime.settings import has_priorities
from runtime.transfer.halves import Halves, refuse

CLOSED: dict[State, str] = {  # states in which no request may come in, and what clients read then
    "draining": "the server is draining; try again later",
    "failed": "the server has failed",
    "closed": "this engine is closed; open another one",
}


def check_open(state: State, num_waiting: int, max_waiting: int) -> None:
    """Raises Unavailable when the state lets no request in, Overloaded when `max_waiting` requests wait."""
    if (reason := CLOSED.get(state)) is not None:
        raise Unavailable(reason)
    if num_waiting >= max_waiting:
        raise Overloaded(
            f"{max_waiting} requests are waiting already (--max-queued-requests); try again later"
        )


class Intake:
    """Checks a request, joins it to its session, gives it its adapter and its record, and hands it to the
    router."""

    def __init__(
        self,
        plan: Plan,
        pooling: Pooling | None,
        router: Router,
        open_requests: OpenRequests,
        *,
        sessions: Sessions,
        adapters: AdapterRegistry | None,
        records: Records,
        metrics: Metrics,
        halves: Halves | None,
        num_running: Callable[[], int],
    ) -> None:
        """`pooling`: how the model pools; None: it generates text. `halves`: with --disaggregation-mode.
        `num_running` gives the number of running requests of all tenants."""
        self._max_queued = plan.schedule.max_queued_requests
        self._encodes_alone = plan.disaggregation.encoder_only
        self._num_replicas = plan.parallel.data_parallel_size
        self._num_running = num_running
        self._refuses_priorities = plan.schedule.abort_on_priority_when_disabled and not has_priorities(plan)
        self._pooling = pooling
        self._router = router
        self._open_requests = open_requests
        self._sessions = sessions
        self._adapters = adapters
        self._records = records
        self._metrics = metrics
        self._halves = halves
        open_requests.closed.subscribe(sessions.ended)
        open_requests.closed.subscribe(records.left)
        if adapters is not None:
            open_requests.closed.subscribe(adapters.ended)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request in; see Service.submit for what it raises."""
        if request.priority is not None and self._refuses_priorities:
            raise InvalidRequest(
                "priorities are off on this server (--enable-priority-scheduling); leave priority out",
                param="priority",
            )
        if request.replica is not None and request.replica >= self._num_replicas:
            raise InvalidRequest(
                f"there is no replica {request.replica}; this server has {self._num_replicas}, from 0 "
                "(--data-parallel-size)",
                param="data_parallel_rank",
            )
        if self._encodes_alone:
            raise InvalidRequest(
                "this server encodes files for others (--encoder-only); send requests to a server with "
                "--language-only"
            )
        check_task(request, self._pooling)
        if request.transfer is not None:
            request = refuse(request.transfer) if self._halves is None else self._halves.take(request)
        self._check_places(request.tenant)
        if request.session is not None:
            request, sink = self._sessions.begin(request, request.session, sink)
        try:
            if request.adapter:
                request = structs.replace(
                    request, adapter_ref=find_adapter(self._adapters, request.adapter, request.tenant)
                )
            sink = self._records.watch(request, sink)
            self._router.submit(request, sink)
            self._records.begin(sink)
            if self._adapters is not None and request.adapter:
                self._adapters.opened(request.id, request.adapter)
        except (Overloaded, Unavailable) as error:
            self._metrics.refused[str(error.status)] += 1
            if request.transfer is not None and self._halves is not None:
                self._halves.rooms.refuse(request.transfer.room)
            raise
        finally:
            if request.before is not None and request.id not in self._open_requests:
                self._sessions.ended(request.id)

    def _check_places(self, tenant: Tenant) -> None:
        """Raises Overloaded for a tenant that takes its part of the queue already. Running requests, of any
        tenant, do not count: a server that has room refuses none."""
        most = tenant.most(self._max_queued)
        if most < self._max_queued and self._open_requests.num_of(tenant) - self._num_running() >= most:
            self._metrics.refused["429"] += 1
            raise Overloaded(
                f"{most} of your requests are waiting already, your part of the queue (--tenant-quota of "
                "--max-queued-requests); try again later"
            )
