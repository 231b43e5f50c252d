"""A small scripted Service: the prompt decides what it answers, and the test when.

echo      the answer to a text or chat is "<n>: " and words of the prompt, one token a word
held      with `hold=True` nothing is generated until `step()` or `run()` is called
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.errors import InvalidRequest, RequestError
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.memory import PARTS, Part
from runtime.messages.ranks import ExpertCounts, Profile
from runtime.messages.requests import (
    NO_SOURCES,
    CacheSources,
    Chat,
    Delta,
    Finish,
    FinishReason,
    GenerateRequest,
    Infill,
    Prompt,
    Sink,
    Text,
    TokenLogprob,
    Tokens,
)
from runtime.messages.sampling import Limits, check
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from runtime.parsing.detect import AnswerFormats
from runtime.service import AdapterCard, Health, Load, LogChange, ModelCard, OpenRequest, TokenizerInfo
from tests.http.fake_halves import WithHalves

VOCAB = 1000
WORDS = ["Hello", " wörld", ",", " 你好", " 😀", " the", " quick", ' "fox"', "\n", " end"]


def words(prompt: Prompt, index: int, count: int) -> list[tuple[int, str]]:
    """Tokens (id, text) of answer `index` to `prompt`: the same for the same input."""
    seed = sum(text(prompt).encode()) + 7 * index
    return [((seed + i) % VOCAB, WORDS[(seed + i) % len(WORDS)]) for i in range(count)]


def text(prompt: Prompt) -> str:
    match prompt:
        case Text():
            return prompt.text
        case Tokens():
            return " ".join(map(str, prompt.ids))
        case Infill():
            return f"{prompt.prefix}...{prompt.suffix}"
        case Chat():
            return json.dumps([prompt.messages, prompt.tools, prompt.template_args, prompt.continue_final])


def ids(prompt: Prompt) -> list[int]:
    return prompt.ids if isinstance(prompt, Tokens) else [byte % VOCAB for byte in text(prompt).encode()]


@dataclass
class Running:
    """One request in progress."""

    request: GenerateRequest
    sink: Sink
    script: list[list[tuple[int, str]]]  # by sequence
    num_generated: int = 0


@dataclass
class FakeControls(WithHalves):
    """Controls that record their calls."""

    calls: list[Any] = field(default_factory=list)
    tenants: list[Tenant] = field(default_factory=list)  # of the calls that take one
    busy: RequestError | None = None  # raised by everything
    sounds: Any = None  # this model takes no files

    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo({"eos_token": "<end>", "other_token": "x"}, "{{ messages }}")

    def configure_logging(self, change: LogChange) -> LogChange:
        self.record(change)
        return LogChange(
            log_requests=bool(change.log_requests),
            log_requests_level=2,
            log_requests_format="text",
            log_level=change.log_level or "info",
        )

    async def pause(self, mode: str) -> None:
        self.record(("pause", mode))

    async def resume(self) -> None:
        self.record("resume")

    async def flush(self) -> int:
        self.record("flush")
        return 7

    async def clear_storage(self) -> int:
        self.record("clear")
        return 9

    def abort(self, prefix: str, tenant: Tenant = DEFAULT_TENANT) -> int:
        self.record(("abort", prefix))
        self.tenants.append(tenant)
        return 2

    def open_requests(self, most: int, tenant: Tenant = DEFAULT_TENANT) -> tuple[int, list[OpenRequest]]:
        self.tenants.append(tenant)
        self.record(("open_requests", most))
        return 2, [OpenRequest(rid="r1", tenant="t", state="running", age_s=1.5, prompt_tokens=3)]

    def start_profile(self, profile: Profile) -> str:
        self.record(profile)
        return profile.folder or "drawn"

    def stop_profile(self) -> str:
        self.record("stop")
        return "drawn"

    @property
    def experts(self) -> "FakeControls":
        return self

    async def count(self, command: str, folder: str = "") -> ExpertCounts:
        self.record((command, folder))
        return ExpertCounts(1, (1, 3), np.arange(4), 7, "x/y.safetensors" if command == "dump" else "")

    def open_session(
        self,
        capacity: int,
        session_id: str | None = None,
        idle_s: float | None = None,
        *,
        is_line: bool = False,
        tenant: Tenant = DEFAULT_TENANT,
    ) -> str:
        self.tenants.append(tenant)
        self.record(("open", capacity, session_id, idle_s, is_line))
        return session_id or "drawn"

    def close_session(self, session_id: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        self.tenants.append(tenant)
        self.record(("close", session_id))

    async def tokenize(self, prompt: Prompt, media: Sequence[MediaSource] = ()) -> list[int]:
        self.record(prompt)
        return ids(prompt)

    def record(self, what: Any) -> None:
        if self.busy is not None:
            raise self.busy
        self.calls.append(what)


@dataclass
class FakeMemorySaver:
    """A memory saver that only records what is released."""

    controls: FakeControls
    released: tuple[Part, ...] = ()

    async def release(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        self.controls.record(("release", parts))
        self.released = tuple(PARTS if parts is None else parts)
        return self.released

    async def resume(self, parts: Sequence[Part] | None = None) -> tuple[Part, ...]:
        self.controls.record(("take", parts))
        self.released = tuple(part for part in self.released if parts is not None and part not in parts)
        return self.released

    async def update_weights(
        self,
        model_path: str,
        load_format: str | None = None,
        version: str | None = None,
        *,
        flushes: bool = True,
    ) -> None:
        self.controls.record(("update_weights", model_path, load_format, version, flushes))


@dataclass
class FakeAdapters:
    """Adapters that are never read."""

    cards: dict[str, AdapterCard] = field(default_factory=dict)

    async def load(
        self, name: str, folder: str, *, is_pinned: bool = False, tenant: Tenant = DEFAULT_TENANT
    ) -> None:
        owner = "" if tenant.sees_all else tenant.name
        self.cards[name] = AdapterCard(name, folder, 8, 5, is_pinned, owner)

    async def unload(self, name: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        if self.cards.pop(name, None) is None:
            raise InvalidRequest(f"no adapter {name} is loaded", param="lora_name")


@dataclass
class FakeService:
    """Answers at once, or step by step with `hold`."""

    hold: bool = False
    refuse: RequestError | None = None  # raised by submit
    fail_after: int | None = None  # tokens after which the sink fails
    fail_with: RequestError = field(
        default_factory=lambda: InvalidRequest("the template failed", param="prompt")
    )
    defaults: dict[str, Any] = field(default_factory=dict)
    preferred: dict[str, Any] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    requests: list[GenerateRequest] = field(default_factory=list)
    loaded: CacheSources = NO_SOURCES  # of the three tokens that are always cached
    storage: str | None = None
    has_cache_report: bool = False
    aborted: list[str] = field(default_factory=list)
    state: Any = "ready"
    formats: AnswerFormats = AnswerFormats()
    has_grammars: bool = False
    says: list[str] | None = None  # instead: the tokens of every answer, which then ends
    controls: FakeControls = field(default_factory=FakeControls)
    held: FakeMemorySaver = field(init=False)
    adapters: FakeAdapters | None = field(default_factory=FakeAdapters)
    tenant: Tenant = DEFAULT_TENANT
    media_kinds: frozenset[MediaKind] = frozenset()

    def __post_init__(self) -> None:
        self.held = FakeMemorySaver(self.controls)

    @property
    def card(self) -> ModelCard:
        limits = Limits(
            vocab_size=VOCAB,
            context_len=100_000,
            pool_tokens=100_000,
            hidden_size=2,
            shows_hidden=True,
            media_kinds=self.media_kinds,
        )
        return ModelCard(
            name="org/fake",
            created=1_700_000_000,
            limits=limits,
            sampling_defaults=self.defaults | self.preferred,
            preferred=self.preferred,
            formats=self.formats,
            has_grammars=self.has_grammars,
            adapters=self.adapters.cards if self.adapters is not None else {},
            storage=self.storage,
            has_cache_report=self.has_cache_report,
        )

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert request.id not in self.running
        self.requests.append(request)
        try:
            check(request.params, ids(request.prompt), self.card.limits)
        except RequestError as error:
            sink.fail(error)
            return
        count = request.params.max_new_tokens or 20 + len(self.says or ())
        script = [words(request.prompt, index, count) for index in range(request.params.n)]
        if self.says is not None:
            script = [list(enumerate(self.says[:count]))] * request.params.n
        self.running[request.id] = Running(request, sink, script)
        if not self.hold:
            self.run()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    def run(self) -> None:
        while self.running:
            self.step()

    def step(self) -> None:
        """One token for each sequence of each running request."""
        for running in list(self.running.values()):
            if running.num_generated == self.fail_after:
                del self.running[running.request.id]
                running.sink.fail(self.fail_with)
                continue
            running.num_generated += 1
            is_last = running.num_generated == len(running.script[0])
            if is_last:
                del self.running[running.request.id]
            for index in range(running.request.params.n):
                running.sink.push(self._delta(running, index, is_last))

    def _delta(self, running: Running, index: int, is_last: bool) -> Delta:
        params, prompt_ids, at = (
            running.request.params,
            ids(running.request.prompt),
            running.num_generated - 1,
        )
        token_id, word = running.script[index][at]
        is_first = at == 0
        prompt = None
        if is_first and params.prompt_logprobs is not None:
            prompt = [
                logprob(i, None if at == 0 else -0.25, params.prompt_logprobs)
                for at, i in enumerate(prompt_ids)
            ]
        finish = None
        if is_last:
            reason = (
                FinishReason.LENGTH if self.says is None or at + 1 < len(self.says) else FinishReason.STOP
            )
            finish = Finish(
                reason,
                None,
                prompt_tokens=len(prompt_ids),
                completion_tokens=at + 1,
                cached_tokens=3,
                loaded=self.loaded,
            )
        logprobs = (
            [logprob(token_id, -0.5, params.top_logprobs, params.logprob_ids)] if params.logprobs else None
        )
        return Delta(
            index,
            word,
            [token_id],
            logprobs,
            prompt,
            finish,
            len(prompt_ids) if is_first else 0,
            3 if is_first else 0,
            prompt_ids if is_first else None,
            loaded=self.loaded if is_first else NO_SOURCES,
            hidden=hidden(params.hidden_states, len(prompt_ids), at, is_last),
        )

    @property
    def memory_saver(self) -> FakeMemorySaver:
        return self.held

    @property
    def control(self) -> FakeControls:
        return self.controls

    def health(self) -> Health:
        return Health(self.state, "as the test says")

    def load(self) -> Load:
        return Load(
            running=len(self.running),
            waiting=0,
            used_pages=4,
            cached_pages=1,
            total_pages=10,
            page_size=16,
            steps=5,
            tokens_per_s=1.5,
        )

    def server_info(self) -> dict[str, Any]:
        return {"version": "0", "options": {"port": 1, "model_path": {"value": "no-such-folder"}}}

    def metrics(self) -> bytes:
        return b"# TYPE running gauge\nrunning 0\n"

    def token_bytes(self, token_id: int) -> bytes:
        return b"\xf0\x9f" if token_id == 999 else f"<{token_id}>".encode()

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids)


def hidden(mode: str | None, prompt_len: int, at: int, is_last: bool) -> list[np.ndarray] | None:
    """What token number `at` brings: the states [i, -1] of the tokens i before it."""
    if mode == "all":
        first, end = (0, prompt_len) if at == 0 else (prompt_len + at - 1, prompt_len + at)
    elif mode == "last" and is_last:
        first, end = prompt_len + at - 1, prompt_len + at
    else:
        return None
    return [np.array([(i, -1) for i in range(first, end)], np.float32)]


def logprob(token_id: int, value: float | None, width: int, picks: tuple[int, ...] = ()) -> TokenLogprob:
    return TokenLogprob(
        token_id,
        value,
        [((token_id + i) % VOCAB, -0.5 - i) for i in range(width)] if value is not None else [],
        [(i, -2.0) for i in picks],
    )
