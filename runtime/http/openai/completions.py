"""POST /v1/completions"""

import time
from typing import Any

import msgspec

from runtime.errors import InvalidRequest, RequestError
from runtime.http import sse
from runtime.http.constraint import constraint_of
from runtime.http.errors import decode, error_object
from runtime.http.exchange import Answer, Output
from runtime.http.openai.envelope import Envelope, finish_fields, usage_of
from runtime.http.openai.logprobs import TextLogprobs
from runtime.http.openai.models import check_model
from runtime.http.openai.sampling import sampling_params
from runtime.http.openai.types import MAX_PROMPTS, CompletionBody, refuse_later
from runtime.http.salts import salts
from runtime.messages import Ask, Infill, Text, Tokens
from runtime.request import Delta, TokenLogprob
from runtime.sampling import SamplingParams
from runtime.service import Service

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "input_ids": "prompt", "top_logprobs": "logprobs",
         "prompt_logprobs": "logprobs", "include_stop": "include_stop_str_in_output"}

_decoder = msgspec.json.Decoder(CompletionBody)


def completions(service: Service, body: bytes) -> Answer:
    """Raises RequestError."""
    arrival_s = time.monotonic()
    wish = decode(body, _decoder)
    check_model(service.card, wish.model)
    refuse_later(wish)
    if wish.best_of is not None and wish.best_of != (wish.n or 1):
        raise InvalidRequest("best_of must equal n: every choice is returned", param="best_of")
    prompts = [_infill(prompt, wish.suffix) for prompt in _prompts(wish.prompt)] if wish.suffix else _prompts(wish.prompt)
    rule, where = constraint_of(wish)
    params = sampling_params(
        wish, service.card.sampling_defaults, NAMES,
        max_new_tokens=DEFAULT_MAX_TOKENS if wish.max_tokens is None and "max_new_tokens" not in service.card.preferred else None,
        constraint=rule,
        logprobs=wish.logprobs is not None, top_logprobs=wish.logprobs, prompt_logprobs=wish.logprobs if wish.echo else None,
    )
    envelope = Envelope("cmpl", "text_completion", service.card.name, params.n, wish.stream_options)
    asks = [
        Ask(id=envelope.id if len(prompts) == 1 else f"{envelope.id}-{i}", prompt=prompt, params=params, arrival_s=arrival_s,
            priority=wish.priority, cache_salt=salt)
        for i, (prompt, salt) in enumerate(zip(prompts, salts(wish, len(prompts)), strict=True))
    ]
    echoes = [_text(service, prompt) for prompt in prompts] if wish.echo else [""] * len(prompts)
    return Answer(service, asks, CompletionDialect(service, envelope, params, echoes), is_stream=bool(wish.stream), names=NAMES | where)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Text | Tokens | Infill]:
    if isinstance(prompt, str):
        return [Text(prompt)]
    if all(isinstance(piece, int) for piece in prompt):
        return [Tokens(prompt)]  # type: ignore[arg-type]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; the most is {MAX_PROMPTS}", param="prompt")
    if all(isinstance(piece, str) for piece in prompt):
        return [Text(text) for text in prompt]  # type: ignore[arg-type]
    if all(isinstance(piece, list) for piece in prompt):
        return [Tokens(ids) for ids in prompt]  # type: ignore[arg-type]
    raise InvalidRequest("prompt mixes kinds; give texts only, token ids only, or lists of token ids only", param="prompt")


def _infill(prompt: Text | Tokens | Infill, suffix: str) -> Infill:
    if not isinstance(prompt, Text):
        raise InvalidRequest("suffix goes with a prompt that is text, not token ids", param="suffix")
    return Infill(prompt.text, suffix)


def _text(service: Service, prompt: Text | Tokens | Infill) -> str:
    """Raises InvalidRequest for ids that have no text."""
    if isinstance(prompt, Text):
        return prompt.text
    if isinstance(prompt, Infill):
        return prompt.prefix
    vocab_size = service.card.limits.vocab_size
    if any(not 0 <= token_id < vocab_size for token_id in prompt.ids):
        raise InvalidRequest(f"token ids must be in 0..{vocab_size - 1}", param="prompt")
    return service.decode(prompt.ids)


class CompletionDialect:
    """Texts; with `echo` each begins with its prompt. `echoes` has that beginning for each prompt."""

    def __init__(self, service: Service, envelope: Envelope, params: SamplingParams, echoes: list[str]) -> None:
        self.envelope = envelope
        self.echoes = echoes
        self.n = params.n
        self.has_logprobs = params.logprobs
        self.around: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands before and after the text
        self.logprobs = [TextLogprobs(service.token_bytes, params.top_logprobs) for _ in range(params.n * len(echoes))]

    def events(self, choice: int, delta: Delta) -> bytes:
        self.envelope.meter.add(choice, delta)
        around = self.around.get(choice)
        text = delta.text
        if around is None:
            self.around[choice] = around = self.envelope.around(lambda text: _choice(choice, text))
            text = self.echoes[choice // self.n] + text
        if delta.finish is None and not self.has_logprobs and not self.envelope.is_continuous:
            return around[0] + sse.encode(text) + around[1] if text else b""
        logprobs = self._logprobs(choice, delta.prompt_logprobs, delta.logprobs)
        return self.envelope.chunk(_choice(choice, text) | {"logprobs": logprobs} | finish_fields(delta.finish))

    def tail(self) -> bytes:
        return self.envelope.tail()

    def failure(self, error: RequestError) -> bytes:
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [
            _choice(i, self.echoes[i // self.n] + output.text)
            | {"logprobs": self._logprobs(i, _of_prompt(outputs, i, self.n), output.logprobs)}
            | finish_fields(output.finish)
            for i, output in enumerate(outputs)
        ]
        return self.envelope.head() | {"choices": choices, "usage": usage_of(outputs, self.n)}

    def _logprobs(self, choice: int, prompt: list[TokenLogprob] | None, own: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return self.logprobs[choice].add([*(prompt or ()), *(own or ())]) if self.has_logprobs else None


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _of_prompt(outputs: list[Output], choice: int, n: int) -> list[TokenLogprob]:
    """Log probabilities of the choice's prompt; they may have come with its first choice only."""
    return outputs[choice].prompt_logprobs or outputs[choice - choice % n].prompt_logprobs
