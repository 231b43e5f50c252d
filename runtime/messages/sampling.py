"""Sampling parameters of a request, with their limits.

Limits that depend on no model are in the types; `check` adds the others (vocabulary, context). It runs in the
tokenizer and again in the scheduler actor, so that no path around HTTP brings a number that harms a rank.
"""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import InvalidRequest, TooLong
from runtime.json_value import JsonDict
from runtime.media_kind import MediaKind
from runtime.messages.constraint import Rule

MAX_N = 128
MAX_TOP_LOGPROBS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_REGEXES = 16
MAX_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED = 1 << 18
MAX_HIDDEN = 1 << 24  # numbers in a request's hidden states: 64 MiB, and some 300 MB as JSON

Priority = A[int, Meta(ge=-(2**63), le=2**63 - 1)]
CacheSalt = A[str, Meta(max_length=1024)]
TokenId = A[int, Meta(ge=0, le=2**31 - 1)]


Mark = A[str, Meta(max_length=MAX_STOP_CHARS)]


class Free(Struct, frozen=True):
    """The first part of an answer, up to `end`, which the constraint does not apply to. With a `begin`: only
    where the prompt ends with that text."""

    end: A[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
    begin: Mark = ""


class ThinkingLimit(Struct, frozen=True):
    """How many tokens an answer may reason, and how it writes its reasoning."""

    budget: A[int, Meta(ge=0, le=2**31 - 1)]
    marks: A[tuple[tuple[Mark, Mark], ...], Meta(min_length=1)]  # what begins reasoning, and what ends it
    is_forced: bool = False  # the answer begins inside reasoning, also where the prompt does not show it
    is_continued: bool = False  # the prompt holds the beginning of the answer
    is_anywhere: bool = False  # reasoning may begin anywhere; else at the start, or behind other reasoning


class Processor(Struct, frozen=True, array_like=True):
    """A logit processor of the server, by name, and its parameters (layers/sampling/processors.py)."""

    name: A[str, Meta(min_length=1, max_length=256)]
    params: A[JsonDict, Meta(max_length=64)] = {}


class SpeculationLimit(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a request lets its tokens be guessed (docs/speculation.md). None of it changes a token."""

    enabled: bool = True
    max_draft_tokens: A[int, Meta(ge=0, le=255)] | None = None  # of a step; None: the server's


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request. Names follow the native API; the HTTP layer maps those of other
    APIs."""

    n: A[int, Meta(ge=1, le=MAX_N)] = 1
    max_new_tokens: A[int, Meta(ge=1, le=2**31 - 1)] | None = None  # None: up to the context length
    min_new_tokens: A[int, Meta(ge=0, le=2**31 - 1)] = 0  # eos and stop tokens are masked until then
    temperature: A[float, Meta(ge=0, le=100)] = 1.0  # 0 is greedy
    top_p: A[float, Meta(gt=0, le=1)] = 1.0
    top_k: A[int, Meta(ge=-1, le=2**31 - 1)] = -1  # -1 and 0: the whole vocabulary
    min_p: A[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: A[float, Meta(ge=-2, le=2)] = 0.0  # applies to generated tokens
    presence_penalty: A[float, Meta(ge=-2, le=2)] = 0.0  # applies to generated tokens
    repetition_penalty: A[float, Meta(gt=0, le=10)] = 1.0  # applies to prompt and generated tokens
    logit_bias: A[dict[TokenId, A[float, Meta(ge=-1000, le=1000)]], Meta(max_length=MAX_BIASES)] = {}
    # the only tokens that may be sampled, what ends the answer included; None: all
    allowed_token_ids: A[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: A[
        tuple[A[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)], ...], Meta(max_length=MAX_BAD_WORDS)
    ] = ()  # texts that do not occur in the answer, as the tokenizer writes them
    seed: A[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: A[
        tuple[A[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)], ...], Meta(max_length=MAX_STOPS)
    ] = ()
    stop_regex: A[
        tuple[A[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)], ...], Meta(max_length=MAX_REGEXES)
    ] = ()
    stop_token_ids: A[tuple[TokenId, ...], Meta(max_length=MAX_STOPS)] = ()
    include_stop: bool = False  # keep the matched stop string or stop token in the output
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False  # of each output token, before temperature and penalties
    top_logprobs: A[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0  # most probable tokens at each position
    # None: no log probabilities of the prompt; k: with the k most probable tokens at each position
    prompt_logprobs: A[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # tokens whose log probabilities are returned at each position
    logprob_ids: A[tuple[TokenId, ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()

    constraint: Rule | None = None  # the form of the answer's text
    # text after which the constraint applies, e.g. the end of the reasoning; "": from the first token on
    constraint_after: Mark | tuple[Free, ...] = ""

    processor: Processor | None = None
    thinking: ThinkingLimit | None = None  # None: reasoning has no budget

    speculation: SpeculationLimit | None = None  # None: as the server speculates

    # hidden states to return: of every computed token, or the one that the last token was sampled from
    hidden_states: Literal["all", "last"] | None = None

    # the first token, counted from the prompt's first, whose routed experts are returned; None: of no token
    routed_experts: A[int, Meta(ge=0)] | None = None

    @property
    def free(self) -> tuple[Free, ...]:
        """The first parts of the answer that the constraint does not apply to."""
        if isinstance(self.constraint_after, str):
            return (Free(self.constraint_after),) if self.constraint_after else ()
        return self.constraint_after

    @property
    def reports_tokens(self) -> bool:
        """Whether steps report more of its tokens than logits tell: hidden states or routed experts."""
        return self.hidden_states is not None or self.routed_experts is not None

    @property
    def max_drafts(self) -> int:
        """Most drafts of a step, where the server speculates."""
        limit = self.speculation
        if limit is None:
            return 255
        most = 255 if limit.max_draft_tokens is None else limit.max_draft_tokens
        return most if limit.enabled else 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes logits."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


PLAIN = SamplingParams()  # the values of what a request does not ask for


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of the served model and its memory."""

    vocab_size: int
    context_len: int  # tokens of prompt and output together
    pool_tokens: int  # tokens that the KV pages can hold for one sequence
    cuts: bool = False  # prompts that are too long are cut instead of refused
    processors: tuple[str, ...] = ()  # names of logit processors that requests may use
    min_new: int = 1  # tokens of output that must fit; 0: the model generates none
    hidden_size: int = 0  # numbers in an embedding, and in a hidden state
    shows_hidden: bool = False  # --enable-return-hidden-states
    routed_size: int = 0  # routed experts of a token in all layers; 0: --enable-return-routed-experts is off
    max_logprobs: int = 20  # alternatives of a token: --max-logprobs
    max_response_bytes: int = 64 * 2**20  # of alternatives and hidden states: --max-response-bytes
    # what the model's encoders take; empty: text only
    media_kinds: frozenset[MediaKind] = frozenset()
    fills_blocks: bool = False  # a diffusion model: its tokens are not sampled one after the other

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return min(self.context_len, self.pool_tokens)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.longest - self.min_new


def cut(prompt_ids: list[int], limits: Limits) -> list[int]:
    """The prompt; where `limits.cuts`, at most as much of its beginning as fits with a token of output."""
    return prompt_ids[: max(limits.longest_prompt, 0)] if limits.cuts else prompt_ids


def too_long(count: str, limits: Limits) -> TooLong:
    """The error for a prompt that does not fit. Anthropic's clients recognise its first words, those of
    OpenAI, vLLM and litellm the others."""
    output = ", with at least one token of output" if limits.min_new else ""
    return TooLong(
        f"prompt is too long: {count} > {limits.longest_prompt} maximum; this model's maximum context length "
        f"is {limits.longest} tokens here{output}",
        param="prompt",
    )


def check_widths(params: SamplingParams, limits: Limits) -> None:
    """Raises InvalidRequest where more alternatives of a token are asked for than this server returns."""
    for name, count in (
        ("top_logprobs", params.top_logprobs),
        ("prompt_logprobs", params.prompt_logprobs or 0),
    ):
        if count > limits.max_logprobs:
            raise InvalidRequest(
                f"{name} is {count}; the most is {limits.max_logprobs} (--max-logprobs), so ask for fewer",
                param=name,
            )
        if count + len(params.logprob_ids) > limits.vocab_size:
            raise InvalidRequest(
                f"{name} is {count}, but the vocabulary has {limits.vocab_size} tokens (logprob_ids count as "
                "well)",
                param=name,
            )


# what only means something of tokens that are sampled one after the other
IN_ORDER = (
    "min_new_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "constraint",
    "processor",
    "thinking",
    "hidden_states",
    "routed_experts",
)


def check_blocks(params: SamplingParams) -> None:
    """Raises InvalidRequest for what a diffusion model does not do."""
    for name in IN_ORDER:
        if getattr(params, name) != getattr(PLAIN, name):
            raise InvalidRequest(
                f"{name} is not supported by this model, a diffusion model, whose tokens are not sampled one "
                "after the other; leave it out",
                param=name,
            )


def check(params: SamplingParams, prompt_ids: list[int], limits: Limits) -> None:
    """Raises InvalidRequest, naming the field, when `params` or the prompt cannot be served within
    `limits`."""
    vocab = limits.vocab_size
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    if len(prompt_ids) > limits.longest_prompt:
        raise too_long(f"{len(prompt_ids)} tokens", limits)
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
        raise InvalidRequest(f"token ids must be in 0..{vocab - 1}", param="input_ids")
    check_widths(params, limits)
    if limits.fills_blocks:
        check_blocks(params)
    for name, ids in (
        ("logprob_ids", params.logprob_ids),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        if max(ids, default=0) >= vocab:
            raise InvalidRequest(f"{name} names a token outside 0..{vocab - 1}", param=name)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest("min_new_tokens is above max_new_tokens", param="min_new_tokens")
    if params.processor is not None and params.processor.name not in limits.processors:
        known = (
            f"it has {', '.join(limits.processors)}"
            if limits.processors
            else "it has none; start it with --enable-custom-logit-processor and --logit-processors"
        )
        raise InvalidRequest(
            f"this server has no logit processor {params.processor.name[:80]!r}; {known}",
            param="custom_logit_processor",
        )
    if params.hidden_states is not None:
        _check_hidden(params, len(prompt_ids), limits)
    if params.routed_experts is not None:
        _check_routed(params.routed_experts, len(prompt_ids), limits)
    if params.constraint is not None and params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos can't be combined with a constraint, which says where the text ends",
            param="ignore_eos",
        )


def _check_routed(start: int, prompt_len: int, limits: Limits) -> None:
    if not limits.routed_size:
        raise InvalidRequest(
            "routed experts are off on this server; start it with --enable-return-routed-experts",
            param="routed_experts",
        )
    if start > prompt_len:
        raise InvalidRequest(
            f"routed experts are asked for from token {start} on, behind the prompt's {prompt_len} tokens",
            param="routed_experts_start_len",
        )


def _check_hidden(params: SamplingParams, prompt_len: int, limits: Limits) -> None:
    if not limits.shows_hidden:
        raise InvalidRequest(
            "hidden_states are off on this server; start it with --enable-return-hidden-states",
            param="hidden_states",
        )
    longest = (
        limits.longest
        if params.max_new_tokens is None
        else min(limits.longest, prompt_len + params.max_new_tokens)
    )
    if params.hidden_states == "all" and params.n * longest * limits.hidden_size > MAX_HIDDEN:
        most = MAX_HIDDEN // limits.hidden_size
        raise InvalidRequest(
            f"hidden_states of {params.n * longest} tokens, prompt and output together, are too many; the "
            f"most is {most}",
            param="hidden_states",
        )
