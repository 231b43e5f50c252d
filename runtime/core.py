"""The runtime without a face: actors, channels and ranks, put together. HTTP and library talk to it as a
Service.

    router ──GenerateRequest──► tokenizer ──Arrive──► scheduler ──StepPlan──► ranks
       └──────────────── Abort ──────────►│   ◄──── StepResult ────┘
    sinks ◄──Delta── detokenizer ◄──StepTokens──┘
                          └─────── Stopped ────►
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from runtime import __version__, log
from runtime.actors.channels import Channel
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.events import EventsActor
from runtime.actors.grammars import Grammars
from runtime.actors.graph_captures import Capturing
from runtime.actors.open_requests import Outputs
from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.storage import StorageActor, open_storage
from runtime.actors.supervisor import Supervisor, count_experts
from runtime.actors.tokenizer import TokenizerActor
from runtime.admin import warmup
from runtime.admin.adapter_registry import Loras, find_adapter
from runtime.admin.control import Control
from runtime.admin.expert_load import Balance
from runtime.admin.heartbeat import StepLog, long_collections
from runtime.admin.memory_saver import MemorySaver
from runtime.cache.journal import Journal
from runtime.errors import InvalidRequest, Overloaded, RankDied, RuntimeFault, StartError, Unavailable
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.scheduler import ToDetokenizer, ToScheduler, Unload
from runtime.metrics import Metrics
from runtime.metrics.meter import Meter
from runtime.metrics.request_log import RequestLogs
from runtime.models.checksums import check_files
from runtime.models.config import ModelConfig, read_config
from runtime.options.plan import Plan
from runtime.scheduling.graph_captures import Captures
from runtime.scheduling.scheduler import Scheduler
from runtime.service import Health, Load, ModelCard, State, check_task
from runtime.settings import (
    answer_formats,
    buckets,
    chat_templates,
    grammar_setup,
    graph_sizes,
    has_priorities,
    limits,
    open_loras,
    piecewise_sizes,
    preferred_sampling,
    random_seeds,
    scheduler_config,
    start_rank,
)
from runtime.text.infill import find_format
from runtime.text.vocabulary import Vocabulary

SHUT: dict[State, str] = {  # why no request comes in
    "draining": "the server is draining; try again later",
    "failed": "the server has failed",
    "closed": "this engine is closed; open another one",
}
DEPTH = 2  # steps in flight; 1 with --disable-overlap-schedule


class Core:
    """Everything behind the faces. `run` is its life; the rest is the Service protocol (service.py)."""

    def __init__(self, plan: Plan) -> None:
        """Reads config.json. Raises ModelError, OptionsError."""
        self.plan = plan
        self.model: ModelConfig = read_config(
            plan.model.model_path,
            is_embedding=plan.model.is_embedding,
            pooling=plan.model.pooling,
            quantization=plan.precision.quantization,
            overrides=plan.model.json_model_override_args,
        )
        self._metrics = Metrics(buckets(plan))
        self._request_logs = RequestLogs(plan, self._metrics)
        self.adapters: Loras | None = open_loras(plan, self.model)
        preferred = preferred_sampling(plan)
        self._warmups = warmup.named(plan.http.warmups)
        self.failure: RuntimeFault | None = None  # why it ended, if not because it was told to
        self.card = ModelCard(
            name=plan.api.served_model_name,
            created=int(time.time()),
            limits=limits(plan, self.model, plan.model.context_length),
            sampling_defaults=(self.model.sampling_defaults if plan.api.sampling_defaults == "model" else {})
            | preferred,
            preferred=preferred,
            pooling=self.model.pooling,
            formats=answer_formats(plan),
            has_tags=plan.kernels.grammar_backend == "xgrammar",
            weight_version=plan.weights.weight_version,
            storage=plan.tiers.hicache_storage_backend,
            has_cache_report=plan.api.enable_cache_report,
            adapters={} if self.adapters is None else self.adapters.cards,
            reads_items_apart=plan.api.multi_item_scoring_delimiter is not None,
        )
        self._state: State = "loading"
        self._meter = Meter(self._metrics)
        self._settled = anyio.Event()  # ready, or failed
        self._outputs = Outputs()
        self._is_empty = anyio.Event()  # no request is open, while draining
        self._outputs.on_close(lambda _: None if len(self._outputs) else self._is_empty.set())
        self._requests = Channel[GenerateRequest](math.inf)
        self._to_scheduler = Channel[ToScheduler](math.inf)  # bounded by max_queued_requests at the door
        self._to_detokenizer = Channel[ToDetokenizer](64)
        self._router = Router(
            self._outputs, self._requests, self._to_scheduler.send_nowait, check_open=self._check_open
        )
        self._supervisor = Supervisor(
            start_rank(plan, self.model, self.adapters),
            self._metrics,
            plan.schedule.watchdog_timeout,
            plan.schedule.soft_watchdog_timeout or 0.0,
            None if self.adapters is None else self.adapters.setup,
        )
        self.control = Control(
            self._router,
            self._to_scheduler.send_nowait,
            self._metrics,
            self._supervisor,
            Balance(
                partial(count_experts, self._supervisor),
                self._metrics,
                num_groups=plan.experts.expert_parallel_size,
                records=plan.experts.expert_distribution_recorder_mode is not None,
            ),
        )
        self.memory_saver = MemorySaver(
            self._supervisor,
            self.control.ask,
            self._to_scheduler.send_nowait,
            partial(name_weights, self),
            can_release=plan.weights.enable_memory_saver,
            has_storage=plan.tiers.hicache_storage_backend is not None,
        )
        self._outputs.on_close(self.control.sessions.ended)
        self._outputs.on_close(self._request_logs.records.left)
        self._supervisor.on_death = self._request_logs.died
        if self.adapters is not None:
            self.adapters.connect(
                self._supervisor, lambda adapter: self._to_scheduler.send_nowait(Unload(adapter))
            )
            self._outputs.on_close(self.adapters.ended)
        self._draw_seed = random_seeds(plan.schedule.random_seed)
        setup = grammar_setup(plan, self.model)
        self._grammars = (
            None if setup is None else Grammars(setup, plan.api.grammar_timeout, self._supervisor.prepare)
        )
        self._vocabulary: Vocabulary | None = None
        self._scheduler: Scheduler | None = None
        self._events: EventsActor | None = None  # with --kv-events-config
        self._storage: StorageActor | None = None  # with --hicache-storage-backend

    # ── life ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Loads, serves until cancelled, and cleans up. A failure of ours ends it without raising: see
        `failure`."""
        try:
            try:
                with long_collections(self.plan.logs.gc_warning_threshold_secs):
                    await self._live()
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
            self.control.close(Unavailable("the server is stopping; try again later"))
            self._router.fail_all(Unavailable("the server is stopping; try again later"))
            with anyio.CancelScope(shield=True):
                await self._supervisor.stop()
            if self._grammars is not None:
                self._grammars.stop()
            if self._events is not None:
                self._events.close()
            for channel in (self._requests, self._to_scheduler, self._to_detokenizer):
                channel.discard()

    async def wait_ready(self) -> None:
        """Returns when requests are served. Raises the StartError or RankDied that prevents it."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def drain(self, deadline_s: float) -> None:
        """No new requests; returns when the open ones have ended, or after `deadline_s`, when they are told
        to come again."""
        if self._state not in ("failed", "closed"):
            self._state = "draining"
        if len(self._outputs):
            self._is_empty = anyio.Event()
            with anyio.move_on_after(deadline_s):
                await self._is_empty.wait()
        self._router.fail_all(Unavailable("the server is stopping; try again later"))

    async def _live(self) -> None:
        begin = time.monotonic()
        if self.plan.observe.kv_events_config is not None and self.plan.observe.kv_events_config.is_on:
            self._events = EventsActor(self.plan.observe.kv_events_config, self._metrics)
        events = self._events

        async def get_ready() -> None:
            await warmup.warm_up(self._warmups, self._router.submit, self.card.limits)
            if self._state == "loading":
                self._state = "ready"
            self._settled.set()
            log.get("start").info(
                "ready",
                seconds=round(time.monotonic() - begin, 3),
                pages=config.num_pages - 1,
                page_size=config.page_size,
                device=self._supervisor.readies[0].device_name,
            )

        async with anyio.create_task_group() as tasks:
            if events is not None:
                tasks.start_soon(events.run)
            tasks.start_soon(self._start_text, tasks)
            await check_model(self.plan)
            await self._supervisor.start()
            if self.plan.tiers.enable_hierarchical_cache and self._supervisor.num_host_pages < 2:
                raise StartError("there is no room for host pages; raise --hicache-size or --hicache-ratio")
            for ready in self._supervisor.readies:
                for phase, seconds in ready.phases_s.items():
                    log.get("start").info(phase, rank=ready.rank, seconds=round(seconds, 3))
            config = scheduler_config(
                self.plan,
                self.model,
                self._supervisor.num_pages,
                self._supervisor.num_host_pages,
                self._supervisor.num_window_pages,
                self._supervisor.num_state_slots,
            )
            journal = None if events is None else Journal(config.page_size)
            scheduler = self._scheduler = self.control.scheduler = self.memory_saver.scheduler = Scheduler(
                config, journal
            )
            if (delayer := scheduler.planner.delayer) is not None:
                delayer.on_admit = self._meter.delayed
            actor = SchedulerActor(
                self._scheduler,
                self._to_scheduler,
                self._to_detokenizer,
                meter=self._meter,
                limits=limits(self.plan, self.model, config.pool_tokens),
                depth=1 if self.plan.schedule.disable_overlap_schedule else DEPTH,
                publish=None if events is None else events.offer,
                look=looks(self.plan, self.model, self._metrics, self.load),
            )
            if self.plan.tiers.hicache_storage_backend is not None:
                self._storage = await open_storage(
                    self.plan, self.model, self._scheduler, self._supervisor.open_hosts(), actor.wake
                )
                self.control.clear_storage = self._storage.clear
                actor.attach(self._storage)
                tasks.start_soon(self._storage.run)
            if self.plan.observe.enable_expert_distribution_metrics:
                tasks.start_soon(self.control.experts.run, lambda: scheduler.totals.steps)
            tasks.start_soon(actor.run)
            tasks.start_soon(get_ready)
            await self._supervisor.run(actor)

    async def _start_text(self, tasks: TaskGroup) -> None:
        """Loads the tokenizer while the ranks load the weights."""
        begin = time.monotonic()
        folder = Path(self.plan.model.tokenizer_path)
        vocabulary = self._vocabulary = await anyio.to_thread.run_sync(
            Vocabulary.load, folder, self.model.vocab_size
        )
        templates = chat_templates(
            vocabulary, self.plan.api.chat_template, self.plan.api.hf_chat_template_name
        )
        infill_format = find_format(
            self.plan.api.completion_template, lambda token: vocabulary.token_id(token) is not None
        )
        tokenizer = TokenizerActor(
            vocabulary,
            templates,
            self._outputs,
            self._requests,
            self._to_scheduler.send_nowait,
            limits=self.card.limits,
            seed=self._draw_seed,
            isolates_tenants=self.plan.memory.isolate_tenants,
            weight_version=self.plan.weights.weight_version,
            infill_format=infill_format,
            eos_ids=self.model.eos_ids,
            check_grammar=None if self._grammars is None else self._grammars.check,
        )
        detokenizer = DetokenizerActor(
            vocabulary, self._outputs, self._to_detokenizer, self._to_scheduler.send_nowait
        )
        self.control.tokenizer = tokenizer
        tasks.start_soon(tokenizer.run)
        tasks.start_soon(detokenizer.run)
        log.get("start").info("tokenizer", seconds=round(time.monotonic() - begin, 3))

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

    # ── Service ────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        plan = self.plan
        if (
            request.priority is not None
            and plan.schedule.abort_on_priority_when_disabled
            and not has_priorities(plan)
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
            if request.before is not None and request.id not in self._outputs:
                self.control.sessions.ended(request.id)

    def _check_open(self) -> None:
        if (shut := SHUT.get(self._state)) is not None:
            raise Unavailable(shut)
        running = self._scheduler.roster.num_running_requests if self._scheduler is not None else 0
        if self._router.num_open - running >= self.plan.schedule.max_queued_requests:
            raise Overloaded(
                f"{self.plan.schedule.max_queued_requests} requests are waiting already (--max-queued-requests); try again later"
            )

    def abort(self, request_id: str) -> None:
        self._metrics.aborted.add(request_id in self._outputs)
        self._router.abort(request_id)

    def health(self) -> Health:
        if self._state != "ready":
            return Health(self._state)
        if released := self.memory_saver.released:
            return Health(
                "released", f"{', '.join(released)} given back; /resume_memory_occupation takes it again"
            )
        return Health(
            "recovering"
            if self._supervisor.is_recovering
            else "paused"
            if self.control.is_paused
            else "ready"
        )

    def load(self) -> Load:
        if (scheduler := self._scheduler) is None:
            return Load(
                running=0,
                waiting=self._router.num_open,
                used_pages=0,
                cached_pages=0,
                total_pages=0,
                page_size=self.plan.memory.page_size,
                steps=0,
                tokens_per_s=0.0,
            )
        cache, window = scheduler.cache, scheduler.cache.window
        return Load(
            running=scheduler.roster.num_running,
            waiting=len(scheduler.roster.waiting),
            used_pages=cache.num_used,
            cached_pages=cache.tree.num_evictable,
            total_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            used_host_pages=cache.host.num_used,
            total_host_pages=cache.tree.hosts.num_pages,
            used_window_pages=window.pool.num_used if window else 0,
            cached_window_pages=window.num_idle if window else 0,
            total_window_pages=window.pool.num_pages if window else 0,
            steps=scheduler.totals.steps,
            tokens_per_s=self._meter.tokens_per_s(time.monotonic()),
            max_running=self.plan.schedule.max_running_requests,
            waiting_tokens=scheduler.roster.waiting.num_tokens,
            prompt_tokens=scheduler.totals.prompt_tokens,
            cached_tokens=scheduler.totals.cached_tokens,
            weights_bytes=sum(r.weights_bytes for r in self._supervisor.readies),
            pages_bytes=sum(r.pages_bytes for r in self._supervisor.readies),
        )

    def server_info(self) -> dict[str, Any]:
        options = self.plan.public()
        return {
            "version": __version__,
            "model": self.card.name,
            "architecture": self.model.architecture,
            "state": self.health().state,
            "context_length": self.plan.model.context_length,
            "vocab_size": self.model.vocab_size,
            "options": options,
            "generation": self._supervisor.generation,
            "released": list(self.memory_saver.released),
            "ranks": [
                {
                    "rank": r.rank,
                    "device": r.device_name,
                    "num_pages": r.num_pages - 1,
                    "weights_bytes": r.weights_bytes,
                    "pages_bytes": r.pages_bytes,
                    "taken_bytes": r.taken_bytes,
                    "phases_s": r.phases_s,
                }
                for r in self._supervisor.readies
            ],
        }

    def metrics(self) -> bytes:
        load, metrics = self.load(), self._metrics
        metrics.running.set(load.running)
        metrics.waiting.set(load.waiting)
        metrics.used_pages.set(load.used_pages)
        metrics.cached_pages.set(load.cached_pages)
        metrics.total_pages.set(load.total_pages)
        metrics.used_host_pages.set(load.used_host_pages)
        metrics.total_host_pages.set(load.total_host_pages)
        metrics.used_window_pages.set(load.used_window_pages)
        metrics.total_window_pages.set(load.total_window_pages)
        if self._scheduler is not None:
            totals = self._scheduler.totals
            for counter, value in (
                (metrics.prompt_tokens, totals.prompt_tokens),
                (metrics.cached_tokens, totals.cached_tokens),
                (metrics.loaded_tokens, totals.loaded_tokens),
                (metrics.saved_pages, totals.saved_pages),
                (metrics.preemptions, totals.preemptions),
                (metrics.held_back, totals.held_back),
                (metrics.priority_preemptions, totals.priority_preemptions),
                (metrics.aged, self._scheduler.roster.waiting.num_aged),
            ):
                counter.value = value
            metrics.timeouts.values.update(self._scheduler.timeouts)
            metrics.tenant_tokens.values = dict(self._scheduler.roster.shares.tokens)
            if self.adapters is not None:
                metrics.of_lora_slots(len(self.adapters.cards), self._scheduler.roster.lora_slots)
        if self._storage is not None:
            self._storage.report(metrics)
        return metrics.render(
            dict(enumerate(self._supervisor.ranks.pids)), self.plan.observe.extra_metric_labels
        )

    def token_bytes(self, token_id: int) -> bytes:
        assert self._vocabulary is not None, "a token, but no tokenizer"
        return self._vocabulary.token_bytes(token_id)

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        if self._vocabulary is None:
            raise Unavailable("the tokenizer is loading; try again in a moment")
        return self._vocabulary.decode(token_ids, skip_special=skip_special)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def name_weights(core: Core, version: str) -> None:
    """Requests that are read from now on share prefixes under this version."""
    core.card = structs.replace(core.card, weight_version=version)
    if core.control.tokenizer is not None:
        core.control.tokenizer.weight_version = version


async def check_model(plan: Plan) -> None:
    """Before anything is read of it. Raises StartError."""
    if plan.model.model_checksum is not None:
        begin = time.monotonic()
        count = await anyio.to_thread.run_sync(
            check_files, Path(plan.model.model_path), Path(plan.model.model_checksum)
        )
        log.get("start").info("checksums", files=count, seconds=round(time.monotonic() - begin, 3))


def looks(
    plan: Plan, model: ModelConfig, metrics: Metrics, load: Callable[[], Load]
) -> Callable[[Scheduler, Any], None] | None:
    """What looks at the scheduler after each round: has steps captured, where the device can, and logs the
    load, where that is wished."""
    kinds = {"sequences": graph_sizes(plan, model), "tokens": piecewise_sizes(plan)}
    captures = [Captures(sizes, unit) for unit, sizes in kinds.items() if sizes]
    found = [Capturing(captures, metrics).look] if captures else []
    if plan.logs.decode_log_interval is not None:
        found.append(StepLog(plan.logs.decode_log_interval, load).look)

    def look(scheduler: Scheduler, ranks: Any) -> None:
        for each in found:
            each(scheduler, ranks)

    return (look if len(found) > 1 else found[0]) if found else None
