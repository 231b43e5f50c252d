"""What operators do to a running runtime: pause and continue generation, flush the cache, abort requests,
record profiles, open sessions. Service.control gives access to it.

    Control ── Pause, Continue, Flush ──► the scheduler of each replica      (admin/scheduler_commands.py)
            ── cancel ──► router ── Abort ──► the scheduler that has the request
"""

from collections.abc import Callable, Sequence

from runtime import log
from runtime.actors.replicas import Replicas
from runtime.actors.router import Router
from runtime.actors.text_pipeline import TextPipeline
from runtime.admin.expert_balancer import open_balancers
from runtime.admin.expert_load import ExpertLoad
from runtime.admin.open_request_list import describe
from runtime.admin.profiling import Profiling
from runtime.admin.scheduler_commands import SchedulerCommands
from runtime.admin.sessions import Sessions
from runtime.admin.sounds import Sounds
from runtime.errors import InvalidRequest, RequestError, StartError
from runtime.messages.media import MediaSource
from runtime.messages.ranks import Profile
from runtime.messages.requests import Prompt
from runtime.messages.scheduler import Continue, Flush, Pause, PauseMode
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from runtime.metrics import Metrics
from runtime.metrics.request_log import RequestLogs, RequestLogSettings
from runtime.models.config.moe_config import MoeConfig
from runtime.options.plan import Plan
from runtime.service import LogChange, OpenRequest, TokenizerInfo


class Control:
    """The Controls protocol (service.py). Where there are several replicas, each command reaches all of
    them."""

    def __init__(
        self,
        plan: Plan,
        moe: MoeConfig | None,
        replicas: Replicas,
        commands: SchedulerCommands,
        router: Router,
        text: TextPipeline,
        metrics: Metrics,
        logs: RequestLogs,
    ) -> None:
        self.halves = replicas.halves
        self._logs = logs
        self.experts = ExpertLoad(
            [replica.commands.count_experts for replica in replicas.owners],
            metrics,
            num_groups=plan.experts.expert_parallel_size,
            is_recorded=plan.experts.expert_distribution_recorder_mode is not None,
            places=lambda: next(iter(replicas)).commands.expert_places,
        )
        self.balancers = open_balancers(plan, list(replicas), 1 if moe is None else moe.routing.num_groups)
        self.sessions = Sessions(lambda request_id: self._cancel(lambda i: i == request_id))
        self._replicas = replicas
        self._commands = commands
        self._router = router
        self._text = text
        self.sounds = Sounds(text, replicas)
        self._metrics = metrics
        self._profiling = Profiling(replicas)

    def configure_logging(self, change: LogChange) -> LogChange:
        """Changes what the server logs. -> what it logs now. Raises InvalidRequest where requests cannot be
        logged."""
        old = self._logs.settings
        new = RequestLogSettings(
            old.is_on if change.log_requests is None else change.log_requests,
            old.level if change.log_requests_level is None else change.log_requests_level,
            old.format if change.log_requests_format is None else change.log_requests_format,
        )
        try:
            if new != old:
                self._logs.configure(new)
        except StartError as error:
            raise InvalidRequest(str(error), param="log_requests") from None
        if change.log_level is not None:
            log.set_level(change.log_level)
        return LogChange(
            log_requests=new.is_on,
            log_requests_level=new.level,
            log_requests_format=new.format,
            log_level=log.level(),
        )

    def tokenizer_info(self) -> TokenizerInfo:
        """What clients may know of the tokenizer."""
        return self._text.tokenizer_info()

    @property
    def is_paused(self) -> bool:
        """Whether all schedulers are paused."""
        return all(
            replica.scheduler is not None and replica.scheduler.is_paused for replica in self._replicas
        )

    async def pause(self, mode: PauseMode) -> None:
        """Plans no more steps; returns when none is in flight."""

        def command(answer: Callable[[None | RequestError], None]) -> Pause:
            return Pause(mode, answer)

        await self._commands.ask(command)

    async def resume(self) -> None:
        """Plans steps again."""
        self._commands.send(Continue())

    async def flush(self) -> int:
        """Empties the prefix caches. -> pages freed. Raises Busy while sequences run."""
        return sum(await self._commands.ask(Flush))

    async def clear_storage(self) -> int:
        """Deletes all pages of this model from storage. -> how many"""
        return sum([await replica.clear_storage() for replica in self._replicas])

    async def tokenize(self, prompt: Prompt, media: Sequence[MediaSource] = ()) -> list[int]:
        """The token ids of a prompt, and of the files that it shows. Raises RequestError."""
        return await self._text.encode(prompt, media)

    def abort(self, prefix: str, tenant: Tenant = DEFAULT_TENANT) -> int:
        """Ends those requests of `tenant` whose ids begin with `prefix`, with reason abort. -> how many"""
        self._commands.check()
        return self._cancel(lambda i: i.startswith(prefix), tenant)

    def open_requests(self, most: int, tenant: Tenant = DEFAULT_TENANT) -> tuple[int, list[OpenRequest]]:
        """-> how many requests of `tenant` have not ended, and the oldest `most` of them."""
        opened = self._router.open_ids(tenant)
        rosters = [one.scheduler.roster for one in self._replicas if one.scheduler is not None]
        return len(opened), [describe(i, self._router.owner(i), rosters) for i in opened[:most]]

    def start_profile(self, params: Profile) -> str:
        """The ranks begin to record a profile. -> the folder of their files"""
        self._commands.check()
        return self._profiling.start(params)

    def stop_profile(self) -> str:
        """The ranks write the profile. -> the folder of their files"""
        self._commands.check()
        return self._profiling.stop()

    def open_session(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
        tenant: Tenant = DEFAULT_TENANT,
    ) -> str:
        """Opens a session of `tenant` (admin/sessions.py). -> its id"""
        return self.sessions.open(capacity, session_id, idle_s, is_line=is_line, tenant=tenant)

    def close_session(self, session_id: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Closes a session. Raises NotFound, also for a session of another tenant."""
        self.sessions.close(session_id, tenant)

    def _cancel(self, matches: Callable[[str], bool], tenant: Tenant = DEFAULT_TENANT) -> int:
        count = self._router.cancel(matches, self._replicas.has_request, tenant)
        self._metrics.aborted.add(count)
        return count
