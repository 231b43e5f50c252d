"""The text actors, which exist once for all replicas: tokenizer, detokenizer and the grammars' compile
process.

    router ──GenerateRequest──► tokenizer ──Arrive──► dispatcher
    all schedulers ──StepTokens──► detokenizer ──Delta──► sinks
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import anyio

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.child_environment import environment
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.grammars import Grammars
from runtime.actors.open_requests import OpenRequests
from runtime.actors.tokenizer import Progress, TokenizerActor
from runtime.cache.namespace import namespace
from runtime.errors import InvalidRequest
from runtime.freed_memory import return_freed_memory
from runtime.gil import giving_way
from runtime.media.loader import MediaLoader
from runtime.media_settings import media_settings
from runtime.messages.constraint import Grammar
from runtime.messages.media import Media, MediaSource
from runtime.messages.requests import GenerateRequest, Prompt
from runtime.messages.sampling import Limits
from runtime.messages.scheduler import Abort, Arrive, Stopped, ToDetokenizer
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.patch_image_config import pixel_ranges
from runtime.options.plan import Plan
from runtime.preparation.preparer import Preparer
from runtime.service import TokenizerInfo
from runtime.settings import TextSetup, grammar_setup, random_seeds
from runtime.text.media_prompts import MediaProcessor, MediaPrompts, Prepared
from runtime.text.prepared_files import MAX_BYTES, keys_of, realm_of
from runtime.text.transformers_processor import TransformersProcessor
from runtime.transfer.open_encoders import open_encoders


def _processor(plan: Plan, model: ModelConfig, text: TextSetup) -> MediaProcessor | None:
    """What prepares files: in processes of their own. None: the model takes text alone."""
    if text.media is None or model.media is None or isinstance(text.media, TransformersProcessor):
        return text.media
    pixels, folder = pixel_ranges(plan.multimodal.mm_process_config), Path(plan.model.model_path)
    return Preparer(text.media, folder, model.media, text.vocabulary, pixels, environment(1))


class TextPipeline:
    """Runs the text actors."""

    def __init__(
        self,
        plan: Plan,
        model: ModelConfig,
        text: TextSetup,
        open_requests: OpenRequests,
        *,
        requests: Channel[GenerateRequest],
        step_tokens: Channel[ToDetokenizer],
        send: Callable[[Arrive | Abort | Stopped], None],
        limits: Limits,
        weight_version: Callable[[], str],
        prepare_grammar: Callable[[Grammar | None], Awaitable[None]],
        progress: Progress,
    ) -> None:
        """`requests` brings requests, `step_tokens` messages of all schedulers; `send` takes a message for
        the scheduler that has the request; `prepare_grammar` has the ranks compile a grammar (None: load
        what compiles any); `progress` is notified of each request."""
        setup = grammar_setup(plan, model)
        self._grammars = None if setup is None else Grammars(setup, plan.api.grammar_timeout, prepare_grammar)
        self._weight_version, self._isolates_tenants = weight_version, plan.memory.isolate_tenants
        self._encoders = encoders = open_encoders(plan, model)  # on other servers
        self._requests = requests
        self._step_tokens = step_tokens
        self._vocabulary = text.vocabulary
        self._templates = text.templates
        self._processor = processor = _processor(plan, model, text)
        self._loader = (
            None if processor is None else MediaLoader(media_settings(plan, processor.sounds), environment(1))
        )
        self.media = (
            None
            if processor is None or self._loader is None
            else MediaPrompts(
                processor,
                self._loader,
                text.vocabulary,
                pools=model.dual is not None,
                kept_bytes=min(MAX_BYTES, self._loader.spare_bytes),
            )
        )
        self._tokenizer = TokenizerActor(
            text.vocabulary,
            text.templates,
            open_requests,
            requests,
            send,
            limits=limits,
            seed=random_seeds(plan.schedule.random_seed),
            isolates_tenants=plan.memory.isolate_tenants,
            weight_version=weight_version,
            infill_format=text.infill_format,
            eos_ids=model.eos_ids,
            media=self.media,
            encode=None if encoders is None else encoders.encode,
            check_grammar=None if self._grammars is None else self._grammars.check,
            tree=text.tree,
            progress=progress,
        )
        self._detokenizer = DetokenizerActor(text.vocabulary, open_requests, step_tokens, send)

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._finish_start)
                tasks.start_soon(self._tokenizer.run)
                tasks.start_soon(self._detokenizer.run)
        finally:
            if self._loader is not None:
                with anyio.CancelScope(shield=True):
                    await self._loader.aclose()
            if self._encoders is not None:
                self._encoders.close()
            if isinstance(self._processor, TransformersProcessor | Preparer):
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._processor.close)

    async def _finish_start(self) -> None:
        """Keeps the texts of the tokens for the next start, and returns what reading the tokenizer has freed.
        A folder that cannot be written to is no error: the texts are made again."""
        await anyio.to_thread.run_sync(return_freed_memory)
        try:
            await anyio.to_thread.run_sync(self._vocabulary.keep_table)
        except OSError as error:
            log.get("tokenizer").info(
                "the texts of the tokens are not kept for the next start", why=str(error)
            )

    def close(self) -> None:
        """Ends the compile process, and drops what waits in the channels."""
        if self._grammars is not None:
            self._grammars.stop()
        self._requests.discard()
        self._step_tokens.discard()

    async def encode(self, prompt: Prompt, media: Sequence[MediaSource] = ()) -> list[int]:
        """The token ids of a prompt with its files. Raises RequestError."""
        ids = await self._tokenizer.encode(prompt)
        if self.media is None or not media:
            return ids
        prepared = await self._prepare(await self.media.loader.load(media))
        ids, _ = await anyio.to_thread.run_sync(self.media.expand, ids, prepared)
        return ids

    async def prepare(self, media: Media, tenant: str) -> Prepared:
        """A file as the encoder takes it: as it was prepared for a request of this tenant, where that is
        kept. Raises RequestError."""
        assert self.media is not None, "a file that was loaded"
        source = MediaSource(kind=media.kind, param=media.param, decoded=media)
        keys = keys_of([source], realm_of(tenant if self._isolates_tenants else ""))
        known = self.media.files.find(keys)
        return (known or await self._prepare([media]))[0]

    async def _prepare(self, media: list[Media]) -> list[Prepared]:
        """Files as the encoder takes them; `media` is empty then. Raises RequestError."""
        assert self.media is not None, "files that were loaded"
        return await anyio.to_thread.run_sync(giving_way, partial(self.media.prepare, media))

    def namespace_of(self, tenant: str) -> str:
        """Where the prefix cache and encodings of this tenant's plain requests are."""
        return namespace(
            weight_version=self._weight_version(), tenant=tenant if self._isolates_tenants else ""
        )

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """Files as the model takes them. Raises RequestError."""
        if self.media is None:
            raise InvalidRequest("this server takes text alone; leave files out", param=sources[0].param)
        return await self.media.loader.load(sources)

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """The text of tokens."""
        return self._vocabulary.decode(token_ids, skip_special=skip_special)

    def tokenizer_info(self) -> TokenizerInfo:
        """What clients may know of the tokenizer."""
        return TokenizerInfo(self._vocabulary.files.special_tokens, self._templates.source)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._vocabulary.token_bytes(token_id)
