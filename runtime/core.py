"""The runtime behind its interfaces: text actors and replicas, put together. HTTP and the library use it as a
Service (service.py).

    router ──GenerateRequest──► tokenizer ──Arrive──► dispatcher ──Arrive──► scheduler ──StepPlan──► ranks
       └────────────────── Abort ────────────────────────►│ ▲                   │   ◄── StepResult ───┘
    sinks ◄──Delta── detokenizer ── Stopped ────────────────┘                   │
                          └◄────────────────── StepTokens ──────────────────────┘

A scheduler and its ranks are a replica (actors/replica.py); everything else exists once.
"""

import math
import time
from functools import partial
from pathlib import Path

import anyio
from msgspec import structs

from runtime import __version__, log
from runtime.actors.channels import Channel
from runtime.actors.dispatcher import Dispatcher
from runtime.actors.early_ranks import begin_loading
from runtime.actors.nodes import open_nodes
from runtime.actors.open_requests import OpenRequests
from runtime.actors.rank_processes import RankProcesses
from runtime.actors.replicas import Replicas
from runtime.actors.router import Router
from runtime.actors.text_pipeline import TextPipeline
from runtime.admin import warmup
from runtime.admin.adapter_registry import AdapterRegistry, open_adapters
from runtime.admin.control import Control
from runtime.admin.intake import Intake, check_open
from runtime.admin.memory_saver import MemorySaver
from runtime.admin.scheduler_commands import SchedulerCommands
from runtime.admin.start_progress import StartProgress
from runtime.admin.status import Status
from runtime.errors import RankDied, RuntimeFault, StartError, Unavailable, first_fault
from runtime.hub.download import fetch_weights
from runtime.json_value import Fields
from runtime.messages.requests import GenerateRequest, Sink
from runtime.messages.scheduler import ToDetokenizer
from runtime.messages.tenants import DEFAULT_TENANT
from runtime.metrics import Metrics
from runtime.metrics.heartbeat import log_long_collections
from runtime.metrics.request_log import RequestLogs
from runtime.metrics.request_progress import RequestProgress
from runtime.models.config.checksums import check_files
from runtime.models.config.model_config import ModelConfig
from runtime.options.footprint import loading_notice
from runtime.options.plan import Plan
from runtime.service import Health, Load, ModelCard, State
from runtime.settings import buckets
from runtime.shutdown import Deadline
from runtime.start import prepare
from runtime.transfer.halves import open_halves
from runtime.transfer.open_encoders import EncoderServer

STOPPING = "the server is stopping; try again later"


def with_adapters(card: ModelCard, adapters: AdapterRegistry | None) -> ModelCard:
    """The card of a model with the cards of its LoRA adapters, as they are at any time."""
    return card if adapters is None else structs.replace(card, adapters=adapters.cards)


class Core:
    """The Service protocol (service.py) over text actors and replicas. `run` is its life; Control,
    MemorySaver and Status in admin/ are what operators use."""

    tenant = DEFAULT_TENANT
    failure: RuntimeFault | None = None  # why it ended, unless it was stopped
    encoders: EncoderServer | None = None  # with --encoder-only, when the ranks are ready
    _state: State = "loading"

    def __init__(self, plan: Plan, processes: RankProcesses | None = None) -> None:
        """Checks all that a start needs (start.py) before anything acts. `processes`: those of the first
        replica's ranks (actors/early_ranks.py); None: `run` starts them. Raises StartError."""
        self.plan, prepared = plan, prepare(plan, partial(begin_loading, processes, plan))
        self.model, self._warmups = prepared.model, prepared.warmups
        self.deadline = Deadline()  # for the end of everything, ranks included
        self._progress, self._settled = StartProgress.of_model(self.model), anyio.Event()  # ready, or failed
        self.instruments = metrics = Metrics(buckets(plan))
        requests, step_tokens = Channel[GenerateRequest](math.inf), Channel[ToDetokenizer](64)
        opened = self._open_requests = OpenRequests()
        size, method = plan.parallel.data_parallel_size, plan.parallel.load_balance_method
        dispatcher = Dispatcher(size, method, opened.closed, lambda: list(self.replicas))
        self._router = router = Router(opened, requests, dispatcher.send, check_open=self._check_open)
        self.adapters: AdapterRegistry | None = open_adapters(
            plan, self.model, lambda load: self.replicas.load_adapter(load), dispatcher.unload, router.fail
        )
        self.card: ModelCard = with_adapters(prepared.card, self.adapters)
        self._halves = halves = open_halves(plan)
        self._logs, self._nodes = logs, nodes = RequestLogs(plan, metrics), open_nodes(plan)
        self.replicas = Replicas(
            plan,
            self.model,
            dispatcher=dispatcher,
            processes=processes,
            nodes=nodes,
            halves=halves,
            outbox=step_tokens,
            metrics=metrics,
            adapters=None if self.adapters is None else self.adapters.setup,
            on_death=logs.rank_died,
            on_progress=self._progress.rank,
        )
        self._text = text = TextPipeline(
            plan,
            self.model,
            prepared.text,
            self._open_requests,
            requests=requests,
            step_tokens=step_tokens,
            send=dispatcher.send,
            limits=self.card.limits,
            weight_version=lambda: self.card.weight_version,
            prepare_grammar=self.replicas.prepare_grammar,
            progress=RequestProgress(metrics, logs.records),
        )
        self._commands = commands = SchedulerCommands(self.replicas)
        self.control = Control(plan, self.model.moe, self.replicas, commands, router, text, metrics, logs)
        self.memory_saver = MemorySaver(plan, self.replicas, self._commands, self._set_weight_version)
        self._status = Status(plan, self.replicas, metrics, self.adapters, halves, lambda: router.num_open)
        self._intake = Intake(
            plan,
            self.model.pooling,
            self._router,
            self._open_requests,
            sessions=self.control.sessions,
            adapters=self.adapters,
            records=logs.records,
            metrics=metrics,
            halves=halves,
            num_running=lambda: self._status.num_running_requests,
        )

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Loads, serves until cancelled, and cleans up. An error of the runtime ends it without raising: see
        `failure`."""
        try:
            try:
                with log_long_collections(self.plan.logs.gc_warning_threshold_secs):
                    await self._serve()
            except BaseExceptionGroup as group:
                if (fault := first_fault(group)) is None:
                    raise
                raise fault from None
        except RuntimeFault as fault:
            self._fail(fault)
        finally:
            if self._state != "failed":
                self._state = "closed"
            self._commands.close(Unavailable(STOPPING))
            self._router.fail_all(Unavailable(STOPPING))
            with anyio.CancelScope(shield=True):
                await self.replicas.stop(self.deadline.remaining_s())
                if self._halves is not None:
                    self._halves.close()
                if self._nodes is not None:
                    self._nodes.close(is_failure=self.failure is not None)
                await anyio.to_thread.run_sync(self._logs.close, self.deadline.remaining_s())
            self._text.close()

    async def wait_ready(self) -> None:
        """Returns when requests are served. Raises the StartError or RankDied that prevents it."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def drain(self, deadline_s: float) -> None:
        """Takes no new requests; returns when the open ones have ended, or after `deadline_s`, when the rest
        fails with Unavailable."""
        if self._state not in ("failed", "closed"):
            self._state = "draining"
        with anyio.move_on_after(deadline_s):
            await self._open_requests.wait_empty()
        self._router.fail_all(Unavailable(STOPPING))

    async def _serve(self) -> None:
        begin = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._progress.run)
            tasks.start_soon(self._text.run)
            log_notices(self.plan, self.model)
            await check_model(self.plan, self._progress)
            if self._nodes is not None:
                await tasks.start(self._nodes.run, self.plan)
            if self._halves is not None:
                await self._halves.start(tasks)
            await self.replicas.start(tasks)
            if self.plan.disaggregation.encoder_only:
                self.encoders = EncoderServer(self.plan, self.model, self.replicas.encode)
                await self.encoders.start(tasks)
            if self.plan.observe.enable_expert_distribution_metrics:
                tasks.start_soon(self.control.experts.run, lambda: self.replicas.num_steps)
            for balancer in self.control.balancers:
                tasks.start_soon(balancer.run)
            self._progress.update("delivery")
            await self.memory_saver.wait_for_weights()
            warmups = self._warmups if self.encoders is None else []
            await warmup.run(warmups, self._router.submit, self.card.limits, self._progress)
            self._progress.end()
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

    def _check_open(self) -> None:
        """Raises Unavailable or Overloaded when no request may come in."""
        check_open(self._state, self._status.num_waiting_requests, self.plan.schedule.max_queued_requests)

    def _set_weight_version(self, version: str) -> None:
        """Requests that are tokenised from now on share prefixes under this version."""
        self.card = structs.replace(self.card, weight_version=version)

    # ── Service ─────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request; its output goes to `sink`. See Service."""
        self._intake.submit(request, sink)

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing from now on."""
        self.instruments.aborted.add(request_id in self._open_requests)
        self._router.abort(request_id)

    def health(self) -> Health:
        """What the runtime can do at this moment."""
        if self._state == "loading":
            return self._progress.health("loading")
        if self._state != "ready":
            return Health(self._state)
        if released := self.memory_saver.released:
            return Health(
                "released", f"{', '.join(released)} released; /resume_memory_occupation resumes them"
            )
        if self.replicas.is_recovering:
            return self._progress.health("recovering")
        if self.control.is_paused:
            return Health("paused")
        count = self.replicas.num_recovering
        return Health("ready", f"{count} of {len(self.replicas)} replicas are recovering" if count else "")

    def load(self) -> Load:
        """How busy all replicas are now."""
        return self._status.load()

    def server_info(self) -> Fields:
        """Options in force, version and ranks; JSON-serialisable."""
        return {
            "version": __version__,
            "model": self.card.name,
            "architecture": self.model.architecture,
            "state": self.health().state,
            "context_length": self.plan.model.context_length,
            "vocab_size": self.model.vocab_size,
            "options": options_in_force(self.plan, self.load()),
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
        """The text of tokens."""
        return self._text.decode(token_ids, skip_special=skip_special)


def options_in_force(plan: Plan, load: Load) -> Fields:
    """Every option with source and reason. --max-total-tokens says what became of it, once ranks have their
    pages."""
    options, num_tokens = plan.public(), load.total_pages * load.page_size
    if num_tokens and (notice := plan.memory.pool_notice(num_tokens)):
        options["max_total_tokens"]["reason"] = notice
    return {**options}


def log_notices(plan: Plan, model: ModelConfig) -> None:
    """Logs how a model is served, where that is not what its checkpoint alone would say."""
    start = log.get("start")
    if model.transformers_json is not None:
        start.info(
            "transformers' own code computes this model, over paged attention",
            architecture=model.architecture,
        )
    if model.wrapper and model.media is None:
        start.info(
            "the text model of this checkpoint is served; requests with images or sound are refused",
            architecture=model.wrapper,
            text_model=model.architecture,
        )
    if (notice := loading_notice(plan, model)) is not None:
        start.info(notice)


async def check_model(plan: Plan, progress: StartProgress) -> None:
    """Downloads what is missing of the model, and compares its files with --model-checksum, before anything
    is loaded. Raises StartError."""
    if plan.model.hub_model is not None:
        progress.update("download")
        await fetch_weights(
            plan.model.hub_model,
            lambda report: progress.update("download", report.done, report.total),
            checks=plan.model.model_checksum == "",
            key=plan.api.admin_api_key,
        )
        progress.end()
    if plan.model.model_checksum:
        begin = time.monotonic()
        progress.update("checksums")
        count = await anyio.to_thread.run_sync(
            check_files, Path(plan.model.model_path), Path(plan.model.model_checksum)
        )
        log.get("start").info("checksums", files=count, seconds=round(time.monotonic() - begin, 3))
        progress.end()
