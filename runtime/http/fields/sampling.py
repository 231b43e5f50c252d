"""Sampling parameters that APIs take under the names of SamplingParams, declared once for all of them."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.messages.sampling import MAX_ALLOWED, MAX_BAD_WORDS, MAX_BIASES, SpeculationLimit


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that go to SamplingParams (messages/sampling.py) as they are; that type has their limits. `null`
    means the same as leaving a field out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    # keys are strings in JSON
    logit_bias: A[dict[int, float], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: A[list[int], Meta(max_length=MAX_ALLOWED)] | None = None
    bad_words: A[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: SpeculationLimit | None = None


SAMPLING_FIELDS = SamplingFields.__struct_fields__
