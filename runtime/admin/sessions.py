"""Sessions: the token ids of a conversation stay here, so that a client sends only new text.

    open ──► session ── turn ── turn ── turn          a turn is a request: its whole prompt, and its output
                          └──── turn (another branch)

A request names the turn that it continues. It computes only tokens that the prefix cache does not have:
little more than its own text, because sequences publish generated tokens when they end. The semantics are
those of SGLang's session_params; in a *streaming* session each request continues the last one without naming
it. Everything happens on the event loop.

A session belongs to the tenant that opened it, and its id is unique among the sessions of that tenant.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from time import monotonic
from uuid import uuid4

from msgspec import structs

from runtime.errors import InvalidRequest, NotFound, Overloaded, RequestError
from runtime.messages.requests import Before, Delta, GenerateRequest, SessionParams, Sink
from runtime.messages.tenants import DEFAULT_TENANT, Tenant

MAX_SESSIONS = 4096
MAX_TURNS = 512  # turns of a session; the oldest are forgotten
MAX_TOKENS = 1 << 26  # tokens of all sessions together, 4 bytes each
# time without a request after which a session is closed, unless it was opened with another one
IDLE_S = 3600.0


class Turn:
    """One request of a session."""

    def __init__(self, request_id: str, parent: "Turn | None", before: Before) -> None:
        self.request_id = request_id
        self.parent = parent
        self.before = before
        self.prompt = array("i")  # the whole prompt, once the request has ended
        self.output = array("i")
        self.is_over = False
        self.num_kept = 0  # tokens that count in Sessions.num_tokens

    @property
    def has_begun(self) -> bool:
        """Whether the prompt is tokenised."""
        return bool(self.prompt or self.before.prompt_ids)

    def tokens(self, params: SessionParams) -> list[int]:
        """The first tokens of a request that continues this turn."""
        tokens = self.prompt.tolist() if self.is_over else list(self.before.prompt_ids)
        if not params.drop_previous_output:
            tokens += self.output.tolist()
        return tokens[: params.offset] if params.offset else tokens

    def descends_from(self, other: "Turn") -> bool:
        """Whether `other` comes before this turn on its branch."""
        turn = self.parent
        while turn is not None and turn is not other:
            turn = turn.parent
        return turn is other


class Session:
    """A conversation: turns by the ids of their requests, oldest first."""

    def __init__(
        self, id: str, owner: str, capacity: int, idle_s: float, *, is_line: bool, now_s: float
    ) -> None:
        self.id = id
        self.owner = owner  # name of the tenant that opened it
        # most tokens that may come before a request (SGLang says characters: a token has one or more)
        self.capacity = capacity
        self.idle_s = idle_s
        self.is_line = is_line
        self.used_s = now_s
        self.turns: dict[str, Turn] = {}


class Recorder:
    """A sink that keeps the tokens of a turn, and passes all deltas on."""

    def __init__(self, turn: Turn, sink: Sink, forget: Callable[[Turn], None]) -> None:
        self._turn = turn
        self._sink = sink
        self._forget = forget

    def push(self, delta: Delta) -> None:
        """Keeps the tokens."""
        self._turn.output.extend(delta.token_ids)
        self._sink.push(delta)

    def fail(self, error: RequestError) -> None:
        """Forgets the turn."""
        self._forget(self._turn)
        self._sink.fail(error)


class Sessions:
    """All sessions of a runtime: bounded in number, closed when idle for too long."""

    def __init__(self, abort: Callable[[str], object], clock: Callable[[], float] = monotonic) -> None:
        """`abort` ends a request, and informs its client."""
        self._abort = abort
        self._clock = clock
        self.num_tokens = Counter[str]()  # tokens of sessions by their owner
        self._sessions: dict[tuple[str, str], Session] = {}  # by owner and id
        self._running: dict[str, tuple[Session, Turn]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
        tenant: Tenant = DEFAULT_TENANT,
    ) -> str:
        """-> the session's id. Raises InvalidRequest when the tenant has one of this id, Overloaded when
        there are too many."""
        self._drop_idle()
        name = session_id or uuid4().hex
        if (tenant.name, name) in self._sessions:
            raise InvalidRequest(
                "a session with this id is open; choose another id, or close that one first",
                param="session_id",
            )
        num_own = sum(owner == tenant.name for owner, _ in self._sessions)
        if len(self._sessions) >= MAX_SESSIONS or num_own >= tenant.most(MAX_SESSIONS):
            raise Overloaded(
                f"as many sessions are open as there may be, {num_own} of them yours; close some, or try "
                "again later"
            )
        self._sessions[tenant.name, name] = Session(
            name,
            tenant.name,
            capacity,
            IDLE_S if idle_s is None else idle_s,
            is_line=is_line,
            now_s=self._clock(),
        )
        return name

    def close(self, session_id: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Closes a session; its running requests go on without it. Raises NotFound."""
        self._drop(self._find(session_id, tenant))

    def begin(
        self, request: GenerateRequest, params: SessionParams, sink: Sink
    ) -> tuple[GenerateRequest, Sink]:
        """A request joins its session. -> the request with the tokens before it, and the sink to submit it
        with.

        Raises InvalidRequest, NotFound.
        """
        self._drop_idle()
        session = self._find(params.id, request.tenant)
        if request.params.n > 1:
            raise InvalidRequest("a session's request has one answer: n must be 1", param="n")
        if request.id in session.turns:
            raise InvalidRequest(
                "the session has a request of this id already; choose another one", param="rid"
            )
        parent = self._parent(session, params)
        before = Before([] if parent is None else parent.tokens(params))
        if len(before.token_ids) >= session.capacity:
            raise InvalidRequest(
                f"the session is full: {len(before.token_ids)} tokens come before this request, and it was "
                f"opened for {session.capacity}",
                param="session_params",
            )
        num_own = self.num_tokens[session.owner]
        if self.num_tokens.total() > MAX_TOKENS or num_own > request.tenant.most(MAX_TOKENS):
            raise Overloaded(
                f"sessions keep as many tokens as they may, {num_own} of them are yours; close some, or try "
                "again later"
            )
        session.used_s = self._clock()
        turn = session.turns[request.id] = Turn(request.id, parent, before)
        if len(session.turns) > MAX_TURNS:
            self._forget(session, next(iter(session.turns.values())))
        self._running[request.id] = session, turn
        return structs.replace(request, before=before), Recorder(
            turn, sink, lambda turn: self._forget(session, turn)
        )

    def ended(self, request_id: str) -> None:
        """A request has ended, or was never taken in; its last tokens may still come."""
        if (entry := self._running.pop(request_id, None)) is None:
            return
        session, turn = entry
        turn.prompt.extend(turn.before.prompt_ids)
        turn.before = Before([])
        turn.is_over = True
        session.used_s = self._clock()
        if not turn.has_begun:
            self._forget(session, turn)
        elif self._is_open(session) and session.turns.get(request_id) is turn:
            turn.num_kept = len(turn.prompt) + len(turn.output)
            self.num_tokens[session.owner] += turn.num_kept

    def _find(self, session_id: str, tenant: Tenant) -> Session:
        """The session of this id that exists for `tenant`, its own first. Raises NotFound."""
        session = self._sessions.get((tenant.name, session_id))
        if session is None and tenant.sees_all:
            session = next((one for (_, id), one in self._sessions.items() if id == session_id), None)
        if session is None:
            raise NotFound(
                f"there is no session {session_id[:256]}: it was never opened, was closed, or was idle for "
                "too long",
                param="session_params.id",
            )
        return session

    def _is_open(self, session: Session) -> bool:
        return self._sessions.get((session.owner, session.id)) is session

    def _parent(self, session: Session, params: SessionParams) -> Turn | None:
        """The turn that a request continues; None: it begins anew. With `replace`, forgets the turns that it
        replaces."""
        if session.is_line:
            if params.replace or params.offset or params.drop_previous_output:
                raise InvalidRequest(
                    "a streaming session only goes on: leave replace, offset and drop_previous_output out",
                    param="session_params",
                )
            parent = next(reversed(session.turns.values()), None)
        else:
            parent = None if params.rid is None else session.turns.get(params.rid)
            if params.rid is not None and parent is None:
                raise InvalidRequest("the session has no request of this id", param="session_params.rid")
        if parent is not None and not parent.has_begun:
            raise InvalidRequest(
                "the request to go on from has not begun; wait for it", param="session_params.rid"
            )
        if params.replace:
            for turn in [t for t in session.turns.values() if parent is None or t.descends_from(parent)]:
                self._forget(session, turn)
                self._abort_if_running(turn)
            if parent is not None:
                self._abort_if_running(parent)
        elif parent is not None and not parent.is_over:
            raise InvalidRequest(
                "the request to go on from has not ended; wait for its end, or replace it",
                param="session_params.rid",
            )
        return parent

    def _abort_if_running(self, turn: Turn) -> None:
        if not turn.is_over:
            self._abort(turn.request_id)

    def _forget(self, session: Session, turn: Turn) -> None:
        if session.turns.get(turn.request_id) is turn:
            del session.turns[turn.request_id]
            self._forget_tokens(session, turn.num_kept)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.owner, session.id]
        self._forget_tokens(session, sum(turn.num_kept for turn in session.turns.values()))

    def _forget_tokens(self, session: Session, count: int) -> None:
        self.num_tokens[session.owner] -= count
        if not self.num_tokens[session.owner]:
            del self.num_tokens[session.owner]

    def _drop_idle(self) -> None:
        """Closes idle sessions. Called whenever a session is used: there is no timer."""
        now_s, busy = self._clock(), {id(session) for session, _ in self._running.values()}
        for session in [
            s for s in self._sessions.values() if now_s - s.used_s > s.idle_s and id(s) not in busy
        ]:
            self._drop(session)
