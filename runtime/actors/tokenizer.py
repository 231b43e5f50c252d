"""The tokenizer actor: a prompt in any form becomes a checked Request with token ids and a seed.

Short prompts are tokenised on the event loop, in order; long ones in a worker thread, where they hold up
neither the loop nor short prompts.
"""

import asyncio
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from anyio.to_thread import run_sync
from msgspec import structs

from runtime import log
from runtime.actors.channels import Channel
from runtime.actors.constraints import Constraints
from runtime.actors.open_requests import OpenRequests
from runtime.cache.namespace import namespace
from runtime.errors import InternalFault, InvalidRequest, RequestError, Unavailable
from runtime.gil import giving_way
from runtime.messages.constraint import Grammar, TreeRule
from runtime.messages.cost import fit
from runtime.messages.media import Media, MediaInput
from runtime.messages.requests import (
    Before,
    Chat,
    Embeds,
    GenerateRequest,
    Infill,
    Pair,
    Prompt,
    Request,
    Text,
    Tokens,
)
from runtime.messages.sampling import Limits, check, cut, too_long
from runtime.messages.scheduler import Arrive
from runtime.text.chat_template import ChatTemplates
from runtime.text.infill import infill
from runtime.text.input_embeds import check_embeds, digest, read_input_embeds
from runtime.text.media_prompts import MediaPrompts, Prepared, check_media, load_media
from runtime.text.prepared_files import are_inline, keys_of, realm_of
from runtime.text.prompt_size import num_chars
from runtime.text.stop_regex import StopRegexes
from runtime.text.token_bans import token_bans
from runtime.text.vocabulary import Vocabulary

INLINE_CHARS = 4096  # characters that take about a millisecond on the event loop (bench/detokenize.py)
HEAD_CHARS = 8  # characters for each token that a sequence may have: about twice the average
HEAD_MARGIN = 1.25  # a text that is cut within a word may have some tokens more than the whole text
THREADS = min(4, os.cpu_count() or 1)  # more than there are cores would only take turns with the event loop


T = TypeVar("T")
Args = TypeVarTuple("Args")


def random_seed() -> int:
    """A seed for a request without one."""
    return secrets.randbits(63)


CheckGrammar = Callable[[Grammar], Awaitable[None]]  # raises RequestError
# the same files with the rows of their encodings as values; raises RequestError
EncodeMedia = Callable[[Sequence[MediaInput]], Awaitable[tuple[MediaInput, ...]]]


class Progress(Protocol):
    """Notified of each request on the event loop; must not wait or raise."""

    def known(self, request_id: str, count: int) -> None:
        """The files of a request came before, and are not loaded again."""
        ...

    def loaded(self, request_id: str, media: Sequence[Media]) -> None:
        """The files of a request were fetched and decoded."""
        ...

    def tokenized(self, request_id: str) -> None:
        """A request goes to the scheduler."""
        ...


class TokenizerActor:
    """Messages in: GenerateRequest. Out: Arrive, or `OpenRequests.fail` once. Requests that were aborted
    meanwhile vanish without a word.

    `to_scheduler` must take a message without waiting or raising.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        open_requests: OpenRequests,
        inbox: Channel[GenerateRequest],
        to_scheduler: Callable[[Arrive], None],
        *,
        limits: Limits,
        seed: Callable[[], int] = random_seed,
        isolates_tenants: bool = False,
        weight_version: Callable[[], str] = lambda: "",
        infill_format: str | None = None,
        check_grammar: CheckGrammar | None = None,
        tree: TreeRule | None = None,
        eos_ids: tuple[int, ...] = (),
        media: MediaPrompts | None = None,
        encode: EncodeMedia | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`check_grammar` None: there are no structured outputs here; `tree`: what all answers follow, None:
        what their requests say; `media` None: the model takes text alone; `encode`: has other servers encode
        files, None: the ranks do."""
        self._media, self._encode_media, self._progress = media, encode, progress
        self._vocabulary = vocabulary
        self._templates = templates
        self._open_requests = open_requests
        self._inbox = inbox
        self._to_scheduler = to_scheduler
        self._limits = limits
        self._seed = seed
        self._isolates_tenants = isolates_tenants
        self._weight_version = weight_version
        self._infill_format = infill_format
        self._check_grammar = check_grammar
        self._constraints = Constraints(vocabulary, eos_ids, tree)
        self._tasks: TaskGroup | None = None
        self._threads = anyio.CapacityLimiter(THREADS)
        self._file_threads = anyio.CapacityLimiter(THREADS)  # that wait while files are prepared elsewhere
        self._log = log.get("tokenizer")

    async def run(self) -> None:
        """Serves until the inbox is closed or the task is cancelled."""
        async with anyio.create_task_group() as self._tasks:
            async for requests in self._inbox:
                for request in requests:
                    # here, so that seeds follow the order of arrival
                    seed = self._seed() if request.params.seed is None else request.params.seed
                    chars = num_chars(request.prompt, INLINE_CHARS) + len(request.prediction)
                    if chars <= INLINE_CHARS and not request.media:
                        self._settle(request, self._try(request, seed))
                        await asyncio.sleep(0)  # many prompts must not hold up the steps
                    else:
                        self._tasks.start_soon(self._tokenize_aside, request, seed)

    async def _tokenize_aside(self, request: GenerateRequest, seed: int) -> None:
        if not self._open_requests.awaits(request.id, request):
            return
        try:
            outcome = await self._tokenize_files(request, seed) if request.media else None
        except RequestError as error:
            self._settle(request, error)
            return
        if outcome is None:
            outcome = await self._in_thread(self._try, request, seed)
        if self._encode_media is not None and isinstance(outcome, Request) and outcome.media:
            try:
                outcome = structs.replace(outcome, media=await self._encode_media(outcome.media))
            except RequestError as error:
                outcome = error
        self._settle(request, outcome)

    async def _tokenize_files(self, request: GenerateRequest, seed: int) -> Request | RequestError:
        """Prepares a request with images, videos or sounds. Raises RequestError where these cannot be
        loaded."""
        prompts, keys = check_media(self._media, request), list[bytes]()
        if prompts.files.max_bytes and are_inline(request.media):
            keys, outcome = await self._in_thread(self._try_known, prompts, request, seed)
            if outcome is not None:
                if self._progress is not None:
                    self._progress.known(request.id, len(keys))
                return outcome
        media = await load_media(prompts, request)
        if self._progress is not None:
            self._progress.loaded(request.id, media)
        given, limiter = (request, seed, (), media, keys), self._file_threads
        return await run_sync(giving_way, self._try, *given, limiter=limiter, abandon_on_cancel=True)

    def _try_known(
        self, prompts: MediaPrompts, request: GenerateRequest, seed: int
    ) -> tuple[list[bytes], Request | RequestError | None]:
        """-> keys of the request's files, and the request where all of them are known"""
        tenant = request.tenant.name if self._isolates_tenants else ""
        keys = keys_of(request.media, realm_of(tenant, request.cache_salt))
        known = prompts.files.find(keys)
        return keys, None if known is None else self._try(request, seed, known)

    async def _in_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await run_sync(giving_way, function, *args, limiter=self._threads, abandon_on_cancel=True)

    def _settle(self, request: GenerateRequest, outcome: Request | RequestError) -> None:
        if not self._open_requests.awaits(request.id, request):
            return
        if isinstance(outcome, RequestError):
            self._open_requests.fail(request.id, outcome)
        elif (
            outcome.grammar_constraint is None
            and (grammar := self._constraints.grammar(request, outcome)) is not None
        ):
            assert self._tasks is not None
            self._tasks.start_soon(self._resolve_grammar, request, outcome, grammar)
        else:
            if request.before is not None:
                request.before.prompt_ids = outcome.prompt_ids
            if self._progress is not None:
                self._progress.tokenized(request.id)
            self._to_scheduler(Arrive(outcome))

    async def _resolve_grammar(self, request: GenerateRequest, tokenized: Request, grammar: Grammar) -> None:
        """Sends the request on when its grammar has been checked."""
        timeout_s = min(math.inf if s is None else s for s in (request.queue_timeout_s, request.timeout_s))
        outcome: Request | RequestError = Unavailable(
            "the request's time was up before its grammar was compiled"
        )
        try:
            if self._check_grammar is None:
                raise InvalidRequest(
                    "constraint is not possible: this server has no structured outputs "
                    "(--grammar-backend none)",
                    param="constraint",
                )
            with anyio.move_on_after(max(timeout_s - (monotonic() - request.arrival_s), 0)):
                await self._check_grammar(grammar)
                constraint = self._constraints.of(tokenized, grammar)
                outcome = structs.replace(tokenized, grammar_constraint=constraint)
        except RequestError as error:
            outcome = error
        self._settle(request, outcome)

    def _try(
        self,
        request: GenerateRequest,
        seed: int,
        prepared: Sequence[Prepared] = (),
        media: list[Media] | None = None,
        keys: Sequence[bytes] = (),
    ) -> Request | RequestError:
        """Prepares a request with the files that its prompt shows: as they were `prepared`, or as they were
        loaded, which are given up then, with the `keys` to keep them under. An unexpected error fails this
        request alone."""
        try:
            if self._media is not None and media:
                prepared = self._media.prepare(media, keys)
            return self.prepare(request, seed, prepared)
        except RequestError as error:
            return error
        except Exception:
            self._log.exception("a prompt could not be tokenised", request=request.id, exc_info=True)
            return InternalFault(
                f"the prompt could not be tokenised; the server's log has the details under {request.id}"
            )

    def prepare(self, request: GenerateRequest, seed: int, files: Sequence[Prepared] = ()) -> Request:
        """Tokenises and checks a request, with the files that its prompt shows. Raises InvalidRequest for a
        prompt or parameters that cannot be served. Thread-safe."""
        second_at, embeds = 0, None
        if isinstance(request.prompt, Embeds):
            embeds = read_input_embeds(request.prompt, self._limits)
            check_embeds(request, request.prompt)
        if request.pools:
            prompt_ids, second_at = self._encode_pooled(request.prompt, request.truncate)
        else:
            prompt, before = request.prompt, request.before
            ids = self._encode(prompt) if before is None else self._continue(prompt, before)
            prompt_ids = cut(ids, self._limits)
        inputs: tuple[MediaInput, ...] = ()
        if self._media is not None and (files or self._media.is_attended):
            prompt_ids, inputs = self._media.expand(prompt_ids, files)
        check(request.params, prompt_ids, self._limits)
        params, longest = fit(request.params, len(prompt_ids), self._limits), self._limits.longest
        params = self._constraints.within(request, params)
        if request.params.stop or request.params.stop_regex:
            self._vocabulary.check_text("stop")
        if request.params.stop_regex:
            StopRegexes(request.params.stop_regex, request.params.stop)  # refuses
        if self._templates.stops and isinstance(request.prompt, Chat):
            params = structs.replace(params, stop=(*params.stop, *self._templates.stops))
        tokenized = Request(
            id=request.id,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            arrival_s=request.arrival_s,
            priority=request.priority,
            is_idle=request.is_idle,
            second_at=second_at,
            adapter=request.adapter_ref,
            embeds=embeds,
            media=inputs,
            token_bans=token_bans(params, self._vocabulary),
            marks=request.marks,
            prediction=self._vocabulary.encode(request.prediction[: HEAD_CHARS * longest], False)[:longest]
            if request.prediction
            else [],
            tenant=request.tenant.name,
            routing_key=request.routing_key,
            replica=request.replica,
            transfer=request.transfer,
            queue_timeout_s=request.queue_timeout_s,
            timeout_s=request.timeout_s,
            namespace=namespace(
                adapter="" if request.adapter_ref is None else request.adapter_ref.digest,
                weight_version=self._weight_version(),
                tenant=request.tenant.name if self._isolates_tenants else "",
                salt=request.cache_salt,
                embeds="" if embeds is None else digest(embeds),
            ),
        )
        if params.thinking is None or params.constraint is not None:
            return tokenized  # a constraint's grammar is checked first
        return structs.replace(tokenized, grammar_constraint=self._constraints.of(tokenized, None))

    def _encode_pooled(self, prompt: Prompt, truncate: int | None) -> tuple[list[int], int]:
        """-> token ids, and the position where a second text begins"""
        longest = self._limits.longest_prompt
        if truncate is not None and truncate > longest:
            raise InvalidRequest(
                f"truncate is {truncate}, but the most this server takes is {longest} tokens",
                param="truncate",
            )
        if isinstance(prompt, Chat):  # an embedder's last token may be one that ends every text
            text = self._templates.render(prompt)
            bos = self._vocabulary.files.special_tokens.get("bos_token", "")
            prompt = Text(text, add_special=not (bos and text.startswith(bos)))
        if truncate is None and not self._limits.cuts and not isinstance(prompt, Pair):
            return self._encode(prompt), 0
        most = longest if truncate == -1 or (truncate is None and self._limits.cuts) else truncate
        match prompt:
            case Pair(text=text, second=second):
                return self._vocabulary.encode_within(self._head(text), self._head(second), most or 2**31)
            case Text(text=text, add_special=add_special):
                return self._vocabulary.encode_within(self._head(text), None, most or 2**31, add_special)
        return self._encode(prompt)[:most], 0

    def _head(self, text: str) -> str:
        """The text, or its beginning where that alone is too long already."""
        head = text[: HEAD_CHARS * self._limits.longest]
        is_enough = (
            len(head) < len(text)
            and len(self._vocabulary.encode(head, False)) > HEAD_MARGIN * self._limits.longest
        )
        return head if is_enough else text

    def _continue(self, prompt: Prompt, before: Before) -> list[int]:
        """Token ids of a prompt that continues others: without the tokens that begin a text."""
        if not before.token_ids:
            return self._encode(prompt)
        ids = self._encode(Text(prompt.text, add_special=False) if isinstance(prompt, Text) else prompt)
        return before.token_ids + (ids[1:] if ids[:1] == [self._vocabulary.bos_id] else ids)

    async def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, without a request. Raises InvalidRequest."""
        if num_chars(prompt, INLINE_CHARS) <= INLINE_CHARS:
            await asyncio.sleep(0)  # many prompts must not hold up the steps
            return self._encode(prompt)
        return await run_sync(giving_way, self._encode, prompt, limiter=self._threads, abandon_on_cancel=True)

    def _encode(self, prompt: Prompt) -> list[int]:
        match prompt:
            case Tokens(ids=ids):
                return ids
            case Embeds(rows=rows, ids=ids):
                return [0] * len(rows) if ids is None else ids
            case Text(text=text, add_special=add_special):
                return self._encode_text(text, add_special)
            case Chat():
                return self._encode_text(self._templates.render(prompt), add_special=False)
            case Pair(text=text, second=second):
                return self._encode_text(text, add_special=True) + self._encode_text(
                    second, add_special=False
                )
            case Infill(prefix=prefix, suffix=suffix):
                if self._infill_format is None:
                    raise InvalidRequest(
                        "the model has no fill-in-the-middle tokens that are known here; leave suffix out, "
                        "or start the server with --completion-template",
                        param="suffix",
                    )
                return self._encode_text(infill(self._infill_format, prefix, suffix), add_special=True)

    def _encode_text(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a text. Of a text that is far too long, only the head is tokenised (megabytes would
        take seconds): it is refused, or cut to tokens that the head has already."""
        longest = self._limits.longest
        head = text[: HEAD_CHARS * longest]
        if (
            len(head) < len(text)
            and len(ids := self._vocabulary.encode(head, add_special)) > HEAD_MARGIN * longest
        ):
            if self._limits.cuts:
                return ids
            raise too_long(f"over {len(ids)} tokens", self._limits)
        return self._vocabulary.encode(text, add_special)
