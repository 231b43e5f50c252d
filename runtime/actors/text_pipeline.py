"""The text actors, which exist once for all replicas: tokenizer, detokenizer and the grammars' compile
process.

    router ──GenerateRequest──► tokenizer ──Arrive──► dispatcher
    all schedulers ──StepTokens──► detokenizer ──Delta──► sinks
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.grammars import Grammars
from runtime.actors.open_requests import OpenRequests
from runtime.actors.tokenizer import TokenizerActor
from runtime.errors import RequestError, Unavailable
from runtime.messages.constraint import Grammar
from runtime.messages.requests import GenerateRequest, Prompt
from runtime.messages.sampling import Limits
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToDetokenizer
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.settings import chat_templates, grammar_setup, random_seeds
from runtime.text.infill import find_format
from runtime.text.vocabulary import Vocabulary


class TextPipeline:
    """Loads the tokenizer, then runs the text actors."""

    def __init__(
        self,
        plan: Plan,
        model: ModelConfig,
        open_requests: OpenRequests,
        *,
        requests: Channel[GenerateRequest],
        step_tokens: Channel[ToDetokenizer],
        send: Callable[[Arrive | Abort | Stopped], None],
        limits: Limits,
        weight_version: Callable[[], str],
        prepare_grammar: Callable[[Grammar | None], Awaitable[None]],
    ) -> None:
        """`requests` brings requests, `step_tokens` messages of all schedulers; `send` takes a message for
        the scheduler that has the request; `prepare_grammar` has the ranks compile a grammar (None: load
        what compiles any)."""
        self._plan = plan
        self._model = model
        self._open_requests = open_requests
        self._asks = requests
        self._step_tokens = step_tokens
        self._send = send
        self._limits = limits
        self._weight_version = weight_version
        setup = grammar_setup(plan, model)
        self._grammars = None if setup is None else Grammars(setup, plan.api.grammar_timeout, prepare_grammar)
        self._seed = random_seeds(plan.schedule.random_seed)
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: TokenizerActor | None = None
        self._end: RequestError | None = None

    async def run(self) -> None:
        """Loads the tokenizer, then serves until cancelled. Raises ModelError, OptionsError."""
        begin = time.monotonic()
        vocabulary = self._vocabulary = await run_sync(
            Vocabulary.load, Path(self._plan.model.tokenizer_path), self._model.vocab_size
        )
        self._tokenizer = self._open_tokenizer(vocabulary)
        detokenizer = DetokenizerActor(vocabulary, self._open_requests, self._step_tokens, self._send)
        log.get("start").info("tokenizer", seconds=round(time.monotonic() - begin, 3))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tokenizer.run)
            tasks.start_soon(detokenizer.run)

    def close(self, error: RequestError) -> None:
        """Ends the compile process; `encode` raises `error` from now on if the tokenizer was never loaded."""
        self._end = error
        if self._grammars is not None:
            self._grammars.stop()
        self._asks.discard()
        self._step_tokens.discard()

    async def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises InvalidRequest; Unavailable while the tokenizer loads."""
        if self._tokenizer is None:
            raise self._end or Unavailable("the tokenizer is loading; try again in a moment")
        return await self._tokenizer.encode(prompt)

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens. Raises Unavailable while the tokenizer loads."""
        if self._vocabulary is None:
            raise Unavailable("the tokenizer is loading; try again in a moment")
        return self._vocabulary.decode(token_ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for. The tokenizer must be loaded."""
        assert self._vocabulary is not None, "a token, but no tokenizer"
        return self._vocabulary.token_bytes(token_id)

    def _open_tokenizer(self, vocabulary: Vocabulary) -> TokenizerActor:
        api = self._plan.api
        return TokenizerActor(
            vocabulary,
            chat_templates(vocabulary, api.chat_template, api.hf_chat_template_name),
            self._open_requests,
            self._asks,
            self._send,
            limits=self._limits,
            seed=self._seed,
            isolates_tenants=self._plan.memory.isolate_tenants,
            weight_version=self._weight_version,
            infill_format=find_format(
                api.completion_template, lambda token: vocabulary.token_id(token) is not None
            ),
            eos_ids=self._model.eos_ids,
            check_grammar=None if self._grammars is None else self._grammars.check,
        )
