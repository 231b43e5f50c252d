"""What operators do to a running runtime: pause and go on, empty the cache, abort requests of others. Behind
Service.control.

    Control ── Pause, Continue, Flush ──► scheduler       answers come back by the function in the message
            ── cancel ──► router ── Abort ──► scheduler
"""

from collections.abc import Awaitable, Callable
from tempfile import mkdtemp
from typing import Any

import anyio
from msgspec import structs

from runtime.actors.router import Router
from runtime.actors.supervisor import Supervisor
from runtime.actors.tokenizer import TokenizerActor
from runtime.admin.expert_load import Balance
from runtime.admin.sessions import Sessions
from runtime.errors import InvalidRequest, RankDied, RequestError, Unavailable
from runtime.messages.ranks import Profile
from runtime.messages.requests import Prompt
from runtime.messages.scheduler import Continue, Flush, Pause, PauseMode, ToScheduler
from runtime.metrics import Metrics
from runtime.scheduling.scheduler import Scheduler


class Reply:
    """An answer that is still to come, or an error in its place."""

    def __init__(self) -> None:
        self._value: Any = None
        self._given = anyio.Event()

    def give(self, value: Any) -> None:
        self._value = value
        self._given.set()

    async def take(self) -> Any:
        await self._given.wait()
        if isinstance(self._value, RequestError):
            raise self._value
        return self._value


async def no_storage() -> int:
    raise InvalidRequest("this server has no storage tier (--hicache-storage-backend)")


class Control:
    """The Controls protocol (service.py). `scheduler` and `tokenizer` are there as soon as they are
    loaded."""

    def __init__(
        self,
        router: Router,
        to_scheduler: Callable[[ToScheduler], None],
        metrics: Metrics,
        supervisor: Supervisor,
        experts: Balance,
    ) -> None:
        self.scheduler: Scheduler | None = None
        self.tokenizer: TokenizerActor | None = None
        # that of the storage tier, where there is one
        self.clear_storage: Callable[[], Awaitable[int]] = no_storage
        self.experts = experts
        self._router = router
        self._to_scheduler = to_scheduler
        self._metrics = metrics
        self.sessions = Sessions(lambda request_id: self._cancel(lambda i: i == request_id))
        self._supervisor = supervisor
        # of which generation of ranks, and the folder for what they will write
        self._recording: tuple[int, str] | None = None
        self._replies: set[Reply] = set()
        self._end: RequestError | None = None

    @property
    def is_paused(self) -> bool:
        return self.scheduler is not None and self.scheduler.is_paused

    async def pause(self, mode: PauseMode) -> None:
        await self.ask(lambda answer: Pause(mode, answer))

    async def resume(self) -> None:
        self._check()
        self._to_scheduler(Continue())

    async def flush(self) -> int:
        return int(await self.ask(Flush))

    async def tokenize(self, prompt: Prompt) -> list[int]:
        if self.tokenizer is None:
            raise self._end or Unavailable("the tokenizer is loading; try again in a moment")
        return await self.tokenizer.encode(prompt)

    def abort(self, prefix: str) -> int:
        self._check()
        return self._cancel(lambda i: i.startswith(prefix))

    def start_profile(self, wish: Profile) -> str:
        self._check()
        if self._recording is not None and self._recording[0] == self._supervisor.generation:
            raise InvalidRequest("a profile is being recorded already; /stop_profile ends it")
        folder = wish.folder or mkdtemp(prefix="runtime-profile-")
        self._tell_ranks(structs.replace(wish, folder=folder))
        if wish.num_steps is None:
            self._recording = self._supervisor.generation, folder
        return folder

    def stop_profile(self) -> str:
        self._check()
        if self._recording is None or self._recording[0] != self._supervisor.generation:
            raise InvalidRequest(
                "no profile is being recorded (ranks that are started again record nothing); /start_profile begins one"
            )
        self._tell_ranks(Profile())
        _, folder = self._recording
        self._recording = None
        return folder

    def _tell_ranks(self, wish: Profile) -> None:
        try:
            is_told = not self._supervisor.is_recovering and self._supervisor.ranks.submit(wish)
        except RankDied:
            is_told = False
        if not is_told:
            raise Unavailable("the ranks cannot be told now; try again in a moment")

    def open_session(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
    ) -> str:
        return self.sessions.open(capacity, session_id, idle_s, is_line=is_line)

    def close_session(self, session_id: str) -> None:
        self.sessions.close(session_id)

    def _cancel(self, matches: Callable[[str], bool]) -> int:
        scheduler = self.scheduler
        count = self._router.cancel(
            matches, lambda i: scheduler is not None and bool(scheduler.roster.siblings(i))
        )
        self._metrics.aborted.add(count)
        return count

    def close(self, error: RequestError) -> None:
        """The scheduler answers no more: who still waits for it is told."""
        self._end = error
        for reply in self._replies:
            reply.give(error)

    async def ask(self, message: Callable[[Callable[[Any], None]], ToScheduler]) -> Any:
        """Sends a message with the function that takes the scheduler's answer, and waits for that. Raises it
        where it is an error."""
        self._check()
        reply = Reply()
        self._replies.add(reply)
        try:
            self._to_scheduler(message(reply.give))
            return await reply.take()
        finally:
            self._replies.discard(reply)

    def _check(self) -> None:
        if self._end is not None:
            raise self._end
        if self.scheduler is None:
            raise Unavailable("the model is loading; try again when /health says ready")
