"""Sampling fields of an OpenAI request as SamplingParams, which has the limits; refusals name the client's
fields."""

from collections.abc import Mapping

from runtime.errors import InvalidRequest
from runtime.http.errors import convert
from runtime.http.fields.sampling import SAMPLING_FIELDS
from runtime.http.openai.completion_request import Shared
from runtime.messages.sampling import SamplingParams

# field of SamplingParams -> field of the request, for what is reported of tokens
REPORTS = {"hidden_states": "return_hidden_states", "routed_experts": "return_routed_experts"}
# field of the request -> field of SamplingParams
FIELDS = {name: name for name in SAMPLING_FIELDS} | {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "n",
    "seed": "seed",
    "include_stop_str_in_output": "include_stop",
    "no_stop_trim": "include_stop",
    "logprob_token_ids": "logprob_ids",
}


def sampling_params(
    body: Shared, defaults: Mapping[str, object], names: Mapping[str, str], **more: object
) -> SamplingParams:
    """SamplingParams of a request. `defaults`: fields of SamplingParams for what the client leaves out;
    `more`: fields that the route derives itself. `names` maps fields of SamplingParams to the client's names.
    Raises InvalidRequest."""
    values = dict(defaults)
    for field, name in FIELDS.items():
        if (value := getattr(body, field)) is not None:
            values[name] = value
    for name in ("stop", "stop_regex"):
        if isinstance(one := getattr(body, name), str):
            values[name] = [one]
    if body.return_hidden_states:
        values["hidden_states"] = "last"
    values.update({name: value for name, value in more.items() if value is not None})
    if body.return_routed_experts:
        if values.get("n", 1) != 1:
            raise InvalidRequest(
                "return_routed_experts is for one answer; leave n at 1, or use /generate",
                param="return_routed_experts",
            )
        values["routed_experts"] = body.routed_experts_start_len or 0
    if body.logprob_token_ids and not values.get("logprobs"):
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs are not available in a stream; leave stream out", param="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return convert(values, SamplingParams, names)
