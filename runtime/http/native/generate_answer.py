"""Writes the answers of POST /generate, in SGLang's form."""

import time
from collections.abc import Sequence

import msgspec

from runtime.errors import RequestError
from runtime.http.errors import error_object
from runtime.http.fields import hidden_states as hidden
from runtime.http.fields import routed_experts
from runtime.http.fields.cached_tokens import tiers
from runtime.http.fields.media_usage import cached_media_fields, media_fields
from runtime.http.native.native_response import Generated
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output, silenced
from runtime.http.streaming.rows import Rows
from runtime.json_value import Fields
from runtime.messages.requests import Delta, DraftCounts, Finish, FinishReason, GenerateRequest, TokenLogprob
from runtime.service import Service


class LogprobOptions(msgspec.Struct, frozen=True):
    """Which log probabilities the answers to one prompt have. `start` -1: none of the prompt."""

    is_on: bool
    start: int
    num_top: int
    ids: list[int] | None = None


class GenerateAnswerFormat:
    """Answers {"text", "output_ids", "meta_info"}; the events of several answers have an `index`."""

    answer_type = Generated | list[Generated]

    def __init__(
        self,
        service: Service,
        requests: list[GenerateRequest],
        logprobs: Sequence[LogprobOptions],
        silent: Sequence[bool],
        *,
        is_batch: bool,
        with_texts: bool,
        is_disjoint: bool = False,
    ) -> None:
        """`silent`, for each request: nothing is generated for the client (max_new_tokens 0), only log
        probabilities."""
        self.service = service
        self.with_texts = with_texts
        self.is_disjoint = is_disjoint
        # request and log probability options of each choice
        self.choices = [
            options
            for options in zip(requests, logprobs, silent, strict=True)
            for _ in range(options[0].params.n)
        ]
        self.is_list = is_batch or len(self.choices) > 1
        self.outputs = [Output() for _ in self.choices]  # so far, of a stream

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        delta = self.visible(choice, delta)
        self.outputs[choice].add(delta)
        answer = self._answer(choice, self.outputs[choice])
        if self.is_disjoint:
            answer |= {"text": delta.text, "output_ids": delta.token_ids}
            if delta.hidden and self.choices[choice][0].params.hidden_states == "all":
                answer["meta_info"]["hidden_states"] = hidden.as_json(
                    delta.hidden, begins=delta.prompt_ids is not None
                )
        return sse.event(answer | {"index": choice} if self.is_list else answer)

    def visible(self, choice: int, delta: Delta) -> Delta:
        """The part of a delta that the client sees."""
        return silenced(delta) if self.choices[choice][2] else delta

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        return sse.DONE

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> object:
        """The answer in one piece."""
        for output, (_, _, is_silent) in zip(outputs, self.choices, strict=True):
            if is_silent:
                output.silence()
        answers = [self._answer(i, output) for i, output in enumerate(outputs)]
        return answers if self.is_list else answers[0]

    def _answer(self, choice: int, output: Output) -> Fields:
        request, logprobs, _ = self.choices[choice]
        end = output.finish
        meta: Fields = {
            "id": request.id,
            "finish_reason": None if end is None else _finish_reason(end),
            "prompt_tokens": output.prompt_tokens if end is None else end.prompt_tokens,
            "completion_tokens": len(output.token_ids) if end is None else end.completion_tokens,
            "cached_tokens": output.cached_tokens if end is None else end.cached_tokens,
            "cached_tokens_details": self._tiers(output if end is None else end),
            "weight_version": self.service.card.weight_version,
            "e2e_latency": time.monotonic() - request.arrival_s,
        }
        if end is not None:
            meta |= media_fields([end.media])
        if end is not None and end.drafts is not None:
            meta |= _speculation(end.drafts)
        if logprobs.is_on:
            meta |= self._logprobs("output", output.logprobs, logprobs)
            asked = output.prompt_logprobs[logprobs.start :] if logprobs.start >= 0 else []
            meta |= self._logprobs("input", asked, logprobs)  # SGLang's clients read the lists in any case
        if end is not None and request.params.hidden_states == "last":
            meta["hidden_states"] = hidden.last(output.hidden)
        elif end is not None and request.params.hidden_states is not None and not self.is_disjoint:
            meta["hidden_states"] = hidden.as_json(output.hidden)
        if end is not None and request.params.routed_experts is not None:
            meta["routed_experts"] = routed_experts.as_base64(output.experts)
            meta["routed_experts_start_len"] = request.params.routed_experts
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _tiers(self, output: Output | Finish) -> Fields | None:
        """Sources of the cached tokens; None where nothing was cached, as in SGLang."""
        if not output.cached_tokens:
            return None
        found = tiers(output.cached_tokens, [output.loaded], self.service.card.storage)
        return found | cached_media_fields([output.media if isinstance(output, Finish) else None])

    def _logprobs(self, prefix: str, tokens: Sequence[TokenLogprob], options: LogprobOptions) -> Fields:
        fields: Fields = {
            f"{prefix}_token_logprobs": Rows(
                tokens, lambda token: self._triple(token.token_id, token.logprob)
            )
        }
        if options.num_top:
            fields[f"{prefix}_top_logprobs"] = Rows(tokens, lambda token: self._triples(token.top))
        if options.ids:
            fields[f"{prefix}_token_ids_logprobs"] = Rows(tokens, lambda token: self._triples(token.picked))
        return fields

    def _triples(
        self, pairs: Sequence[tuple[int, float]]
    ) -> list[tuple[float | None, int, str | None]] | None:
        return [self._triple(*pair) for pair in pairs] or None

    def _triple(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, self.service.decode([token_id]) if self.with_texts else None


def _speculation(drafts: DraftCounts) -> Fields:
    """SGLang's fields about drafts."""
    rows, accepted = drafts.rows, drafts.accepted
    return {
        "spec_verify_ct": rows,
        "spec_draft_token_num": drafts.drafted,
        "spec_accept_token_num": accepted,
        "spec_accept_rate": accepted / drafts.drafted,
        "spec_accept_length": 1 + accepted / rows,
        "spec_accept_histogram": drafts.histogram,
    }


def _finish_reason(end: Finish) -> Fields:
    if end.reason is FinishReason.LENGTH:
        return {"type": "length", "length": end.completion_tokens}
    if end.reason is FinishReason.STOP:
        return {"type": "stop", "matched": end.matched}
    return {"type": "abort", "message": "the request was aborted"}
