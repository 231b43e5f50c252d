"""The runtime behind its interfaces: text actors and replicas, put together. HTTP and the library use it as a
Service (service.py).

    router ──GenerateRequest──► tokenizer ──Arrive──► dispatcher ──Arrive──► scheduler ──StepPlan──► ranks      a replica each
       └──────────────── Abort ─────────────►│                     │   ◄──── StepResult ────┘
    sinks ◄──Delta── detokenizer ◄────────StepTokens───────────────┘
                          └─── Stopped ──►dispatcher
"""

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from runtime import __version__, log
from runtime.actors.channels import Channel, Listeners
from runtime.actors.dispatcher import Dispatcher
from runtime.actors.fan_out import call_all
from runtime.actors.open_requests import OpenRequests
from runtime.actors.replica import Replica
from runtime.actors.router import Router
from runtime.actors.text_pipeline import TextPipeline
from runtime.admin import warmup
from runtime.admin.adapter_registry import AdapterRegistry, find_adapter
from runtime.admin.control import Control
from runtime.admin.expert_load import ExpertLoad
from runtime.admin.heartbeat import log_long_collections
from runtime.admin.memory_saver import MemorySaver
from runtime.admin.scheduler_commands import SchedulerCommands
from runtime.admin.status import Status
from runtime.errors import InvalidRequest, Overloaded, RankDied, RuntimeFault, StartError, Unavailable
from runtime.messages.constraint import Grammar
from runtime.messages.lora import LoadAdapter
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.scheduler import ToDetokenizer, ToScheduler
from runtime.metrics import Metrics
from runtime.metrics.request_log import RequestLogs
from runtime.models.checksums import check_files
from runtime.models.config import ModelConfig, read_config
from runtime.options.plan import Plan
from runtime.service import Health, Load, ModelCard, State, check_task
from runtime.settings import buckets, has_priorities, model_card, open_adapters

CLOSED: dict[State, str] = {  # why no request may come in
    "draining": "the server is draining; try again later",
    "failed": "the server has failed",
    "closed": "this engine is closed; open another one",
}
STOPPING = "the server is stopping; try again later"


class Core:
    """The Service protocol (service.py) over text actors and replicas. `run` is its life; see Control, MemorySaver and
    Status in admin/ for what operators use."""

    def __init__(self, plan: Plan, num_replicas: int = 1) -> None:
        """Reads config.json and the adapters. Raises ModelError, OptionsError."""
        self.plan = plan
        self.model: ModelConfig = read_config(
            plan.model.model_path,
            is_embedding=plan.model.is_embedding,
            pooling=plan.model.pooling,
            quantization=plan.precision.quantization,
            overrides=plan.model.json_model_override_args,
        )
        self.failure: RuntimeFault | None = None  # why it ended, unless it was stopped
        self._state: State = "loading"
        self._settled = anyio.Event()  # ready, or failed
        self._is_empty = anyio.Event()  # no request is open, while draining
        self._metrics = Metrics(buckets(plan))
        self._request_logs = RequestLogs(plan, self._metrics)
        self._warmups = warmup.parse(plan.http.warmups)
        closed = Listeners[str]()
        self._open_requests = OpenRequests(closed)
        requests = Channel[GenerateRequest](math.inf)
        inboxes = [
            Channel[ToScheduler](math.inf) for _ in range(num_replicas)
        ]  # bounded by max_queued_requests
        step_tokens = Channel[ToDetokenizer](64)
        dispatcher = Dispatcher(inboxes, closed)
        self._router = Router(self._open_requests, requests, dispatcher.send, check_open=self._check_open)
        self.adapters: AdapterRegistry | None = open_adapters(
            plan, self.model, self._load_adapter, dispatcher.unload
        )
        self.card: ModelCard = model_card(plan, self.model, self.adapters)
        self.replicas = [
            Replica(
                plan,
                self.model,
                index=index,
                num_replicas=num_replicas,
                inbox=inbox,
                outbox=step_tokens,
                metrics=self._metrics,
                adapters=self.adapters,
                on_death=self._request_logs.rank_died,
            )
            for index, inbox in enumerate(inboxes)
        ]
        self._text = TextPipeline(
            plan,
            self.model,
            self._open_requests,
            requests=requests,
            step_tokens=step_tokens,
            send=dispatcher.send,
            limits=self.card.limits,
            weight_version=lambda: self.card.weight_version,
            prepare_grammar=self._prepare_grammar,
        )
        self._commands = SchedulerCommands(self.replicas)
        self.control = Control(
            self.replicas,
            self._commands,
            router=self._router,
            encode=self._text.encode,
            experts=ExpertLoad(
                [replica.commands.count_experts for replica in self.replicas],
                self._metrics,
                num_groups=plan.experts.expert_parallel_size,
                is_recorded=plan.experts.expert_distribution_recorder_mode is not None,
            ),
            metrics=self._metrics,
        )
        self.memory_saver = MemorySaver(
            self.replicas,
            self._commands,
            self._set_weight_version,
            can_release=plan.weights.enable_memory_saver,
            has_storage=plan.tiers.hicache_storage_backend is not None,
        )
        self._status = Status(
            plan, self.replicas, self._metrics, self.adapters, lambda: self._router.num_open
        )
        closed.subscribe(self._request_closed)

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Loads, serves until cancelled, and cleans up. An error of the runtime ends it without raising: see
        `failure`."""
        try:
            try:
                with log_long_collections(self.plan.logs.gc_warning_threshold_secs):
                    await self._serve()
            except BaseExceptionGroup as group:
                fault, rest = group.split(RuntimeFault)
                if rest is not None or fault is None:
                    raise
                raise _first(fault) from None
        except RuntimeFault as fault:
            self._fail(fault)
        finally:
            if self._state != "failed":
                self._state = "closed"
            self._commands.close(Unavailable(STOPPING))
            self._router.fail_all(Unavailable(STOPPING))
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for replica in self.replicas:
                        tasks.start_soon(replica.stop)
            self._text.close(Unavailable(STOPPING))

    async def wait_ready(self) -> None:
        """Returns when requests are served. Raises the StartError or RankDied that prevents it."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def drain(self, deadline_s: float) -> None:
        """Takes no new requests; returns when the open ones have ended, or after `deadline_s`, when the rest fails
        with Unavailable."""
        if self._state not in ("failed", "closed"):
            self._state = "draining"
        if len(self._open_requests):
            self._is_empty = anyio.Event()
            with anyio.move_on_after(deadline_s):
                await self._is_empty.wait()
        self._router.fail_all(Unavailable(STOPPING))

    async def _serve(self) -> None:
        begin = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._text.run)  # the tokenizer loads while the ranks load the weights
            await check_model(self.plan)
            await self._start_replicas(tasks)
            if self.plan.observe.enable_expert_distribution_metrics:
                tasks.start_soon(
                    self.control.experts.run, lambda: sum([replica.num_steps for replica in self.replicas])
                )
            await warmup.run(self._warmups, self._router.submit, self.card.limits)
            if self._state == "loading":
                self._state = "ready"
            self._settled.set()
            log.get("start").info(
                "ready",
                seconds=round(time.monotonic() - begin, 3),
                pages=self.load().total_pages,
                page_size=self.plan.memory.page_size,
                device=self.replicas[0].supervisor.readies[0].device_name,
            )

    async def _start_replicas(self, tasks: TaskGroup) -> None:
        """Starts all replicas at the same time; returns when their ranks are ready."""
        async with anyio.create_task_group() as starting:
            for replica in self.replicas:
                starting.start_soon(tasks.start, replica.run)

    def _fail(self, fault: RuntimeFault) -> None:
        self._state = "failed"
        self.failure = fault
        if isinstance(fault, RankDied):
            log.get("ranks").error(
                "the ranks died and are not started again", rank=fault.rank, exit_code=fault.exit_code
            )
        message = (
            "the model could not be loaded"
            if isinstance(fault, StartError)
            else "the model process ended; try again later"
        )
        self._router.fail_all(Unavailable(message))
        self._settled.set()

    # ── what other objects call ────────────────────────────────────────────────────────────────────────────────

    def _request_closed(self, request_id: str) -> None:
        """A request has ended."""
        if not len(self._open_requests):
            self._is_empty.set()
        self.control.sessions.ended(request_id)
        self._request_logs.records.left(request_id)
        if self.adapters is not None:
            self.adapters.ended(request_id)

    def _check_open(self) -> None:
        """Raises Unavailable or Overloaded when no request may come in."""
        if (reason := CLOSED.get(self._state)) is not None:
            raise Unavailable(reason)
        max_waiting = self.plan.schedule.max_queued_requests
        if self._status.num_waiting_requests >= max_waiting:
            raise Overloaded(
                f"{max_waiting} requests are waiting already (--max-queued-requests); try again later"
            )

    async def _load_adapter(self, load: LoadAdapter) -> None:
        await call_all([partial(replica.commands.load_adapter, load) for replica in self.replicas])

    def _prepare_grammar(self, grammar: Grammar | None) -> None:
        for replica in self.replicas:
            replica.commands.prepare(grammar)

    def _set_weight_version(self, version: str) -> None:
        """Requests that are tokenised from now on share prefixes under this version."""
        self.card = structs.replace(self.card, weight_version=version)

    # ── Service ────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request; see Service."""
        schedule = self.plan.schedule
        if (
            request.priority is not None
            and schedule.abort_on_priority_when_disabled
            and not has_priorities(self.plan)
        ):
            raise InvalidRequest(
                "priorities are off on this server (--enable-priority-scheduling); leave priority out",
                param="priority",
            )
        check_task(request, self.model.pooling)
        if request.session is not None:
            request, sink = self.control.sessions.begin(request, request.session, sink)
        try:
            if request.adapter:
                request = structs.replace(request, adapter_ref=find_adapter(self.adapters, request.adapter))
            sink = self._request_logs.records.watch(request, sink)
            self._router.submit(request, sink)
            self._request_logs.records.begin(sink)
            if self.adapters is not None and request.adapter:
                self.adapters.opened(request.id, request.adapter)
        except (Overloaded, Unavailable) as error:
            self._metrics.refused[str(error.status)] += 1
            raise
        finally:
            if request.before is not None and request.id not in self._open_requests:
                self.control.sessions.ended(request.id)

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing from now on."""
        self._metrics.aborted.add(request_id in self._open_requests)
        self._router.abort(request_id)

    def health(self) -> Health:
        """What the runtime can do at this moment."""
        if self._state != "ready":
            return Health(self._state)
        if released := self.memory_saver.released:
            return Health(
                "released", f"{', '.join(released)} released; /resume_memory_occupation resumes them"
            )
        if any(replica.supervisor.is_recovering for replica in self.replicas):
            return Health("recovering")
        return Health("paused" if self.control.is_paused else "ready")

    def load(self) -> Load:
        """How busy all replicas are now."""
        return self._status.load()

    def server_info(self) -> dict[str, Any]:
        """Options in force, version and ranks; JSON-serialisable."""
        return {
            "version": __version__,
            "model": self.card.name,
            "architecture": self.model.architecture,
            "state": self.health().state,
            "context_length": self.plan.model.context_length,
            "vocab_size": self.model.vocab_size,
            "options": self.plan.public(),
            "generation": self._status.generation,
            "released": list(self.memory_saver.released),
            "ranks": self._status.ranks(),
        }

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._status.metrics()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._text.token_bytes(token_id)

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens. Raises Unavailable while the tokenizer loads."""
        return self._text.decode(token_ids, skip_special=skip_special)


async def check_model(plan: Plan) -> None:
    """--model-checksum: compares the model's files with it, before anything is loaded. Raises StartError."""
    if plan.model.model_checksum is not None:
        begin = time.monotonic()
        count = await anyio.to_thread.run_sync(
            check_files, Path(plan.model.model_path), Path(plan.model.model_checksum)
        )
        log.get("start").info("checksums", files=count, seconds=round(time.monotonic() - begin, 3))


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
