"""The library: an engine in your own process and on your own event loop, without HTTP or with it mounted in
your app. Options are those of `runtime serve`, with underscores.

    async with Engine(model_path="DIR") as engine:
        answer = await engine.generate("Once upon a time", max_new_tokens=20)
        async for delta in engine.stream([{"role": "user", "content": "Hello!"}]):
            ...
        app.mount("/llm", engine.asgi())

    llm = LLM()                             # for code without an event loop; close it, or use `with`

    llm = runtime.asgi(model_path="DIR")    # an ASGI app that starts its engine in its lifespan
    Starlette(routes=[Mount("/llm", llm)], lifespan=llm.lifespan)

No signal handlers, no loop policy, no root logger, no environment: those belong to the application. Any
number of engines can live in one process.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeAlias, cast, overload
from uuid import uuid4

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskGroup
from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.actors.stream_sink import StreamSink
from runtime.admin.engine_controls import BlockingEngineControls, EngineControls
from runtime.core import Core
from runtime.errors import InvalidRequest, OptionsError, RuntimeFault, StartError, Unavailable
from runtime.http.app import http_app
from runtime.http.embeddings.library import Classes, Ranked, Texts
from runtime.http.errors import invalid
from runtime.http.openai.stored_objects import StoredObjects, open_stored_objects
from runtime.http.settings import http_settings
from runtime.json_value import JsonDict
from runtime.messages.media import MediaSource
from runtime.messages.requests import (
    Chat,
    Delta,
    Embeds,
    Finish,
    GenerateRequest,
    Prompt,
    SessionParams,
    Text,
    TokenLogprob,
    Tokens,
)
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.service import Health, Load, Service

# text, token ids, chat messages, or embeddings [tokens, hidden size]
PromptLike = str | Sequence[int] | Sequence[JsonDict] | np.ndarray | Embeds
# prompts of one call: texts, or lists of token ids or messages
Batch = list[str] | list[list[int]] | list[list[JsonDict]]
# of SamplingParams, or one that `stream` names; checked when the request is made
SamplingParam: TypeAlias = Any


class Answer(Struct):
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish: Finish | None = None
    hidden_parts: list[np.ndarray] = []
    expert_parts: list[np.ndarray] = []

    def add(self, delta: Delta) -> None:
        """Appends the output of a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish = delta.finish or self.finish
        self.hidden_parts += delta.hidden or []
        self.expert_parts += delta.experts or []

    @property
    def hidden_states(self) -> np.ndarray | None:
        """float32: with hidden_states="all" [prompt + tokens - 1, size], with "last" [1, size]; None without
        that parameter."""
        return np.concatenate(self.hidden_parts) if self.hidden_parts else None

    @property
    def routed_experts(self) -> np.ndarray | None:
        """int32 [prompt + tokens - 1, layers * experts of a token]: the experts that computed each token, in
        all layers, from token `routed_experts` on; None without that parameter."""
        return np.concatenate(self.expert_parts) if self.expert_parts else None


class Engine(EngineControls):
    """A model served to this process. Use as `async with`; raises StartError on entry when it cannot
    start."""

    def __init__(self, model_path: str | None = None, /, **options: object) -> None:
        """`model_path` may also be one of the options. Raises OptionsError."""
        if model_path is not None and options.keys() & {"model", "model_path"}:
            raise OptionsError(["the model is given twice; give it first or by name"])
        named = {} if model_path is None else {"model_path": model_path}
        self._core = Core(plan_for(from_values(named | options)))
        self._tasks: TaskGroup | None = None  # from when it is opened on
        self._stored_objects: StoredObjects | None = None

    @property
    def _service(self) -> Service:
        """Raises Unavailable before the engine was opened: nothing would answer."""
        if self._tasks is None:
            raise Unavailable("this engine is not open; use it within `async with engine:`")
        return self._core

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise Unavailable("an engine is opened once; make another one")
        if self._core.plan.weights.checkpoint_engine_wait_weights_before_ready:
            raise StartError(
                "--checkpoint-engine-wait-weights-before-ready is for `runtime serve`; here leave it out, "
                "and call update_weights_from_disk before the first request"
            )
        self._stored_objects = open_stored_objects(self._core, self._core.plan, self._core.instruments)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._core.run)
        try:
            await self._core.wait_ready()
        except RuntimeFault:  # the core has ended by itself
            await self._tasks.__aexit__(None, None, None)
            raise
        except BaseException as error:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(type(error), error, error.__traceback__)
            raise
        self._tasks.start_soon(self._stored_objects.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        await self._core.drain(0)
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is None or group.exceptions != (error,):
                raise  # else what the caller raised leaves as it is

    async def stream(
        self,
        prompt: PromptLike,
        *,
        cache_salt: str = "",
        rid: str | None = None,
        lora_path: str = "",
        session: SessionParams | None = None,
        media: Sequence[MediaSource] = (),
        **sampling: SamplingParam,
    ) -> AsyncIterator[Delta]:
        """Yields deltas of all `n` sequences as they come. `sampling` are fields of SamplingParams. Cached
        prefixes are shared with requests of the same `cache_salt` only. `rid` is the request's id, for
        `abort_request` and `session`; `lora_path` the name of a loaded adapter; `media` the prompt's images.

        Closing the iterator early aborts the request. Raises InvalidRequest, Overloaded, Unavailable."""
        request = GenerateRequest(
            id=rid or f"engine-{uuid4().hex}",
            prompt=_prompt(prompt),
            params=_params(sampling),
            arrival_s=monotonic(),
            cache_salt=cache_salt,
            session=session,
            adapter=lora_path,
            media=tuple(media),
        )
        sink = StreamSink(request.params.n)
        self._service.submit(request, sink)
        try:
            while deltas := await sink.take():
                for delta in deltas:
                    yield delta
        finally:
            if not sink.is_over:
                self._core.abort(request.id)

    async def generate(self, prompt: PromptLike, **sampling: SamplingParam) -> Answer:
        """The answer, when it is complete. Raises what `stream` raises, and InvalidRequest for `n` above 1:
        see generate_n."""
        if sampling.get("n", 1) != 1:
            raise InvalidRequest("generate returns one answer; call generate_n for several", param="n")
        return (await self.generate_n(prompt, **sampling))[0]

    async def generate_n(self, prompt: PromptLike, **sampling: SamplingParam) -> list[Answer]:
        """All `n` answers, when they are complete. Raises what `stream` raises."""
        answers: dict[int, Answer] = {}
        async for delta in self.stream(prompt, **sampling):
            answers.setdefault(delta.index, Answer()).add(delta)
        return [answers[index] for index in sorted(answers)]

    def health(self) -> Health:
        """What the engine can do at this moment."""
        return self._core.health()

    def load(self) -> Load:
        """How busy the engine is now."""
        return self._core.load()

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self._core.metrics()

    def asgi(self) -> ASGIApp:
        """The HTTP API of this engine, to be mounted under any prefix while the engine is open. Routes that
        affect all requests need admin_api_key, because it is not known here who can connect."""
        return http_app(self._core, http_settings(self._core.plan, is_local=False), self._stored_objects)


class LLM(BlockingEngineControls):
    """Engine for blocking code: its event loop runs in a thread of its own."""

    _engine: Engine

    def __init__(self, model_path: str | None = None, /, **options: object) -> None:
        self._engine = Engine(model_path, **options)
        super().__init__(self._engine)

    @overload
    def generate(self, prompts: Batch, **sampling: SamplingParam) -> list[Answer]:
        """An Answer for each prompt."""

    @overload
    def generate(self, prompts: PromptLike, **sampling: SamplingParam) -> Answer:
        """An Answer for one prompt."""

    def generate(self, prompts: PromptLike | Batch, **sampling: SamplingParam) -> Answer | list[Answer]:
        """An Answer for one prompt (text, token ids or chat messages), a list of Answers for a list of
        prompts. Raises what Engine.generate raises."""
        if isinstance(prompts, list) and prompts and all(isinstance(p, str | list) for p in prompts):
            return self._call(self._generate_all, cast(Batch, prompts), sampling)
        return self._call(partial(self._engine.generate, cast(PromptLike, prompts), **sampling))

    def generate_n(self, prompt: PromptLike, **sampling: SamplingParam) -> list[Answer]:
        """All `n` answers to one prompt; see Engine.generate_n."""
        return self._call(partial(self._engine.generate_n, prompt, **sampling))

    def embed(
        self,
        texts: Texts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | None = None,
    ) -> np.ndarray:
        """Embeddings of texts; see Vectors.embed (http/embeddings/library.py)."""
        return self._call(
            partial(self._engine.embed, texts, dimensions=dimensions, normalize=normalize, truncate=truncate)
        )

    def encode(self, texts: Texts, **params: object) -> JsonDict | list[JsonDict]:
        """Pooled vectors of texts; see Vectors.encode."""
        return self._call(partial(self._engine.encode, texts, **params))

    def classify(
        self, texts: Texts, *, use_activation: bool | None = None, truncate: int | None = None
    ) -> Classes | list[Classes]:
        """Class probabilities of texts; see Vectors.classify."""
        return self._call(
            partial(self._engine.classify, texts, use_activation=use_activation, truncate=truncate)
        )

    def score(
        self,
        text_1: str | Sequence[str] | None = None,
        text_2: str | Sequence[str] | None = None,
        *,
        use_activation: bool | None = None,
        truncate: int | None = None,
        **labels: object,
    ) -> float | list[float] | list[list[float]]:
        """Scores of pairs of texts; see Vectors.score."""
        return self._call(
            partial(
                self._engine.score, text_1, text_2, use_activation=use_activation, truncate=truncate, **labels
            )
        )

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: int | None = None
    ) -> list[Ranked]:
        """Documents by their relevance for a query; see Vectors.rerank."""
        return self._call(partial(self._engine.rerank, query, documents, top_n=top_n, truncate=truncate))

    async def _generate_all(self, prompts: Batch, sampling: dict[str, SamplingParam]) -> list[Answer]:
        answers: list[Answer] = [Answer()] * len(prompts)

        async def one(index: int) -> None:
            answers[index] = await self._engine.generate(prompts[index], **sampling)

        try:
            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(one, index)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        return answers


class EngineApp:
    """An ASGI app that owns an engine: it lives from lifespan start-up to shut-down."""

    def __init__(self, model_path: str | None = None, /, **options: object) -> None:
        self._model_path, self._options = model_path, options
        self._app: ASGIApp | None = None
        self.engine: Engine | None = None  # while the lifespan lasts

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """For applications that mount this one: lifespan events do not reach mounted apps."""
        async with Engine(self._model_path, **self._options) as engine:
            self.engine, self._app = engine, engine.asgi()
            try:
                yield
            finally:
                self.engine = self._app = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._serve_lifespan(receive, send)
        elif self._app is None:
            raise Unavailable(
                "the engine is not running: pass this app's `lifespan` to the application that mounts it"
            )
        else:
            await self._app(scope, receive, send)

    async def _serve_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            await send(
                {
                    "type": "lifespan.startup.failed" if self._app is None else "lifespan.shutdown.failed",
                    "message": str(error),
                }
            )
            raise
        await send({"type": "lifespan.shutdown.complete"})


def asgi(model_path: str | None = None, /, **options: object) -> EngineApp:
    """An ASGI app with an engine of its own; see the top of this file."""
    return EngineApp(model_path, **options)


def _params(sampling: dict[str, SamplingParam]) -> SamplingParams:
    lone = {name: (sampling[name],) for name in ("stop", "stop_regex") if isinstance(sampling.get(name), str)}
    try:
        return msgspec.convert(sampling | lone, SamplingParams)
    except msgspec.ValidationError as error:
        raise invalid(error, SamplingParams) from None


def _prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return Text(prompt)
    if isinstance(prompt, np.ndarray):
        return Tokens(prompt.tolist()) if prompt.ndim == 1 and prompt.dtype.kind in "iu" else Embeds(prompt)
    if isinstance(prompt, Embeds):
        return prompt
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview)
    if is_list and all(isinstance(item, int) for item in prompt):
        return Tokens([int(item) for item in prompt])  # type: ignore[arg-type]
    if is_list and all(isinstance(item, dict) for item in prompt):
        return Chat([dict(item) for item in prompt])  # type: ignore[arg-type]
    raise InvalidRequest(
        "a prompt is a text, a list of token ids, a list of chat messages, or an array of embeddings",
        param="prompt",
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
