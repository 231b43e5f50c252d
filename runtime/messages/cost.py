"""What the answer to a request may cost beyond its tokens: the log probabilities of alternatives, and hidden
states.

A request of a hundred bytes can ask for gigabytes of them. The cost is a pure function of the request, so a
request above --max-response-bytes is refused before anything of it is queued (`check_cost`) and, where its
prompt is text, once more when the prompt's tokens are known (`fit`). Text, token ids and one log probability
for each token are not counted: they are proportional to what the model computes.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from runtime.errors import InvalidRequest
from runtime.messages.requests import Embeds, GenerateRequest, Prompt, Text, Tokens
from runtime.messages.sampling import Limits, SamplingParams, check_widths

ALTERNATIVE_BYTES = 96  # of JSON: a token, its bytes and its log probability
NUMBER_BYTES = 4  # of a hidden state, in memory; some 16 as JSON
TOKEN_CHARS = 4  # of a text, on average
MAX_SEQUENCES = 8192  # of one request
REMEDY = "ask for fewer alternatives, tokens, choices or prompts, or raise --max-response-bytes"


class Cost(Struct, frozen=True):
    """The most that an answer may contain."""

    prompt_alternatives: int = 0
    alternatives: int = 0  # of generated tokens
    hidden_numbers: int = 0
    entries: int = 0  # tokens with a log probability, and their alternatives
    expert_numbers: int = 0  # routed experts
    has_picks: bool = False  # more of the alternatives are named by the request than are the likeliest

    @property
    def num_bytes(self) -> int:
        """Bytes of what is counted."""
        alternatives = self.prompt_alternatives + self.alternatives
        return alternatives * ALTERNATIVE_BYTES + (self.hidden_numbers + self.expert_numbers) * NUMBER_BYTES

    @property
    def field(self) -> str:
        """The parameter that asks for the most."""
        parts = {
            "prompt_logprobs": self.prompt_alternatives * ALTERNATIVE_BYTES,
            "logprob_ids" if self.has_picks else "top_logprobs": self.alternatives * ALTERNATIVE_BYTES,
            "hidden_states": self.hidden_numbers * NUMBER_BYTES,
            "routed_experts": self.expert_numbers * NUMBER_BYTES,
        }
        return max(parts, key=lambda name: parts[name])


def is_free(params: SamplingParams) -> bool:
    """Whether answers have nothing but text and token ids."""
    return not params.logprobs and params.prompt_logprobs is None and not params.reports_tokens


def cost_of(
    params: SamplingParams, prompt_tokens: int, new_tokens: int, hidden_size: int, routed_size: int = 0
) -> Cost:
    """The cost of `params.n` answers of `new_tokens` tokens; sizes as in Limits."""
    picks = len(params.logprob_ids)
    width = params.top_logprobs + picks
    prompt_width = 0 if params.prompt_logprobs is None else params.prompt_logprobs + picks
    prompt_alternatives = params.n * prompt_tokens * prompt_width
    alternatives = params.n * new_tokens * width if params.logprobs else 0
    states = {None: 0, "last": 1, "all": prompt_tokens + new_tokens}[params.hidden_states]
    tokens = params.n * (
        new_tokens * params.logprobs + (0 if params.prompt_logprobs is None else prompt_tokens)
    )
    return Cost(
        prompt_alternatives,
        alternatives,
        params.n * states * hidden_size,
        tokens + prompt_alternatives + alternatives,
        0 if params.routed_experts is None else params.n * (prompt_tokens + new_tokens) * routed_size,
        picks > params.top_logprobs,
    )


def repeated(cost: Cost, new_tokens: int) -> Cost:
    """The cost of a stream each of whose events, one a token, has everything so far."""
    return Cost(
        cost.prompt_alternatives * new_tokens,
        cost.alternatives * (new_tokens + 1) // 2,
        cost.hidden_numbers,
        cost.entries,
        cost.expert_numbers,
        cost.has_picks,
    )


def total(costs: Sequence[Cost]) -> Cost:
    """The cost of several answers together."""
    return Cost(
        sum([cost.prompt_alternatives for cost in costs]),
        sum([cost.alternatives for cost in costs]),
        sum([cost.hidden_numbers for cost in costs]),
        sum([cost.entries for cost in costs]),
        sum([cost.expert_numbers for cost in costs]),
        any([cost.has_picks for cost in costs]),
    )


class TokenRange(Struct, frozen=True):
    """How many tokens a prompt has that is not tokenised yet."""

    estimate: int
    most: int


def prompt_length(prompt: Prompt, limits: Limits) -> TokenRange:
    """The tokens of a prompt, no more than the longest that is taken. A chat, which its template writes, is
    estimated at none."""
    longest = limits.longest_prompt
    match prompt:
        case Tokens(ids=tokens) | Embeds(rows=tokens):
            estimate = most = len(tokens)
        case Text(text=text):
            estimate = len(text) // TOKEN_CHARS
            most = longest if len(text) >= longest else len(text.encode("utf-8", "surrogatepass")) + 1
        case _:
            estimate, most = 0, longest
    return TokenRange(min(estimate, longest), min(most, longest))


def check_sequences(requests: Sequence[GenerateRequest]) -> int:
    """The number of sequences of requests that come together. Raises InvalidRequest for too many."""
    count = sum([request.params.n for request in requests])
    if count > MAX_SEQUENCES:
        raise InvalidRequest(
            f"n asks for {count} answers, {len(requests)} prompts together; the most is {MAX_SEQUENCES}, so "
            "send fewer prompts at once",
            param="n",
        )
    return count


def check_cost(requests: Sequence[GenerateRequest], limits: Limits, *, is_repeated: bool = False) -> None:
    """Raises InvalidRequest for requests that ask together for more than `limits` allow. `is_repeated`: each
    event of the stream has everything so far. One request that leaves its length open is not refused for it:
    `fit` ends it in time."""
    costs = []
    for request in requests:
        params = request.params
        if is_free(params):
            continue
        check_widths(params, limits)
        new_tokens = params.max_new_tokens
        if new_tokens is None:
            new_tokens = 1 if len(requests) == 1 and not is_repeated else limits.longest
        cost = cost_of(
            params,
            prompt_length(request.prompt, limits).estimate,
            min(new_tokens, limits.longest),
            limits.hidden_size,
            limits.routed_size,
        )
        costs.append(repeated(cost, min(new_tokens, limits.longest)) if is_repeated else cost)
    if costs:
        _refuse_above(total(costs), limits, is_repeated=is_repeated)


def fit(params: SamplingParams, prompt_tokens: int, limits: Limits) -> SamplingParams:
    """The parameters of a request whose prompt is known. One that leaves its length open ends, with reason
    `length`, where its answer would have more than `limits` allow. Raises InvalidRequest."""
    if is_free(params):
        return params
    longest, sizes = max(limits.longest - prompt_tokens, 1), (limits.hidden_size, limits.routed_size)
    if params.max_new_tokens is not None:
        new_tokens = min(params.max_new_tokens, longest)
        _refuse_above(cost_of(params, prompt_tokens, new_tokens, *sizes), limits)
        return params
    first = cost_of(params, prompt_tokens, 1, *sizes)
    _refuse_above(first, limits)
    each = cost_of(params, prompt_tokens, 2, *sizes).num_bytes - first.num_bytes
    most = 1 + (limits.max_response_bytes - first.num_bytes) // each if each else longest
    return params if most >= longest else structs.replace(params, max_new_tokens=most)


def _refuse_above(cost: Cost, limits: Limits, *, is_repeated: bool = False) -> None:
    if cost.num_bytes <= limits.max_response_bytes:
        return
    field = cost.field
    why = " (each event of the stream has everything so far: leave stream out)" if is_repeated else ""
    raise InvalidRequest(
        f"{field} asks for up to {cost.num_bytes} bytes in the answer, above the {limits.max_response_bytes} "
        f"that this server writes{why}; {REMEDY}",
        param=field,
    )
