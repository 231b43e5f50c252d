"""What chat and text completions share in their answers: the envelope of chunks, usage and finish reasons."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import uuid4

from runtime.http.fields.cached_tokens import tiers
from runtime.http.fields.media_usage import cached_media_fields, media_fields, of_prompt
from runtime.http.openai.completion_request import StreamOptions
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output
from runtime.json_value import Fields
from runtime.messages.media import MediaUsage
from runtime.messages.requests import CacheSources, Delta, DraftCounts, Finish
from runtime.service import CacheReport

_MARK = "f3b0c5e2-text"  # placeholder for the text while a chunk is split in two


class Meter:
    """Counts the tokens of a stream. The tokens of a prompt count once, however many choices it has."""

    def __init__(self, n: int, report: CacheReport | None = None) -> None:
        self.n = n
        self.report = report
        self.loaded: dict[int, CacheSources] = {}  # by prompt
        self.prompt_tokens: dict[int, int] = {}  # by prompt
        self.cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.drafts: list[DraftCounts] = []
        self.media: dict[int, MediaUsage] = {}  # by prompt

    def add(self, choice: int, delta: Delta) -> None:
        """Counts a delta of a choice."""
        prompt = choice // self.n
        self.completion_tokens += len(delta.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens
        if delta.prompt_tokens:
            self.prompt_tokens[prompt] = delta.prompt_tokens
            self._cached(prompt, delta.cached_tokens, delta.loaded)
        if delta.finish is not None:
            self.prompt_tokens[prompt] = delta.finish.prompt_tokens
            self._cached(prompt, delta.finish.cached_tokens, delta.finish.loaded)
            if delta.finish.drafts is not None:
                self.drafts.append(delta.finish.drafts)
            media = of_prompt([self.media.get(prompt), delta.finish.media])
            if media is not None:
                self.media[prompt] = media

    def usage(self) -> dict[str, object]:
        """The `usage` of what was added so far."""
        return usage(
            sum(self.prompt_tokens.values()),
            self.completion_tokens,
            sum(self.cached_tokens.values()),
            self.reasoning_tokens,
            self.report,
            self.loaded.values(),
            self.drafts,
            list(self.media.values()),
        )

    def _cached(self, prompt: int, tokens: int, loaded: CacheSources) -> None:
        if tokens >= self.cached_tokens.get(prompt, 0):
            self.cached_tokens[prompt], self.loaded[prompt] = tokens, loaded


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int,
    report: CacheReport | None,
    loaded: Iterable[CacheSources],
    drafts: Sequence[DraftCounts],
    media: Sequence[MediaUsage | None] = (),
) -> dict[str, object]:
    """The `usage` object. `loaded`: sources of the cached tokens, one entry a prompt; used with a cache
    `report`. `drafts`: of the sequences that had some. `media`: one entry a prompt."""
    details: Fields = {"cached_tokens": cached_tokens}
    details |= media_fields(media)
    cached = {} if report is None else tiers(cached_tokens, loaded, report.storage)
    if cached := cached | cached_media_fields(media):
        details["cached_tokens_details"] = cached
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens} | _predictions(drafts),
    }


def _predictions(drafts: Sequence[DraftCounts]) -> dict[str, int]:
    """OpenAI's counts of predicted tokens; none where nothing was predicted."""
    if not drafts:
        return {}
    accepted = sum([counts.accepted for counts in drafts])
    drafted = sum([counts.drafted for counts in drafts])
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def usage_of(outputs: list[Output], n: int, report: CacheReport | None) -> dict[str, object]:
    """The `usage` of whole outputs; `outputs` has `n` choices of each prompt, prompt after prompt."""
    ends = [output.finish for output in outputs if output.finish is not None]
    prompts = [ends[i : i + n] for i in range(0, len(ends), n)]
    most = [max(prompt, key=lambda end: end.cached_tokens) for prompt in prompts]
    return usage(
        sum(prompt[0].prompt_tokens for prompt in prompts),
        sum(end.completion_tokens for end in ends),
        sum(end.cached_tokens for end in most),
        sum(output.reasoning_tokens for output in outputs),
        report,
        [end.loaded for end in most],
        [end.drafts for end in ends if end.drafts is not None],
        [of_prompt([end.media for end in prompt]) for prompt in prompts],
    )


def finish_fields(finish: Finish | None) -> dict[str, object]:
    """`finish_reason` as in OpenAI's API, and as an extension `matched_stop`: the stop string, stop
    token or end-of-text token."""
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason.value, "matched_stop": finish.matched}


class Envelope:
    """The fields that all chunks of an answer share."""

    def __init__(
        self,
        prefix: str,
        kind: str,
        model: str,
        n: int,
        options: StreamOptions | None,
        id: str | None = None,
        report: CacheReport | None = None,
    ) -> None:
        """`n`: choices of each prompt. `id`: the request id that the client gave, if any."""
        self.id = id or f"{prefix}-{uuid4().hex}"
        self.kind = kind
        self.created = int(time.time())
        self.model = model
        self.is_continuous = bool(options and options.continuous_usage_stats)
        self.with_usage = bool(options and options.include_usage) or self.is_continuous
        self.meter = Meter(n, report)

    def head(self, suffix: str = "") -> dict[str, object]:
        """The fields of a chunk before its choices."""
        return {"id": self.id, "object": self.kind + suffix, "created": self.created, "model": self.model}

    def chunk(self, choice: Mapping[str, object], suffix: str = "", **more: object) -> bytes:
        """An event with one choice. `more`: fields next to `choices`; those that are None are left out."""
        fields = (
            self.head(suffix)
            | {"choices": [choice]}
            | {name: value for name, value in more.items() if value is not None}
        )
        if self.with_usage:
            fields["usage"] = self.meter.usage() if self.is_continuous else None
        return sse.event(fields)

    def chunks(self, choices: Sequence[Mapping[str, object]], suffix: str = "", **more: object) -> bytes:
        """Events with one choice each, at least one; `more` goes to the last."""
        *first, last = choices
        return b"".join([self.chunk(one, suffix) for one in first]) + self.chunk(last, suffix, **more)

    def around(self, choice: Callable[[str], dict[str, object]], suffix: str = "") -> tuple[bytes, bytes]:
        """The bytes before and after the text in the chunk of `choice(text)`: most chunks differ in their
        text only."""
        before, after = self.chunk(choice(_MARK), suffix).split(sse.encode(_MARK))
        return before, after

    def tail(self, suffix: str = "") -> bytes:
        """The last events: usage, if the client asked for it, and [DONE]."""
        if not self.with_usage:
            return sse.DONE
        return sse.event(self.head(suffix) | {"choices": [], "usage": self.meter.usage()}) + sse.DONE
