"""The first token of an answer whose prompt another server has computed: it need not wait for the pages of
the prompt (transfer/fetches.py).

The sequence waits with one token, as one that was preempted does, and goes on from there.
"""

from runtime.cache.sequence import Sequence
from runtime.messages.requests import TokenLogprob
from runtime.scheduling.scheduler import Scheduler


def takes_first(sequence: Sequence) -> bool:
    """Whether the token that the other server samples is the one that would be sampled here. That server
    knows no grammar and no limit of reasoning (Halves.take), and reports nothing but the token and its log
    probabilities."""
    params = sequence.request.params
    return (
        params.n == 1
        and params.constraint is None
        and params.thinking is None
        and params.processor is None
        and not params.reports_tokens
        and params.prompt_logprobs is None
        and not sequence.num_generated
        and len(sequence.tokens) < sequence.max_len
    )


def take_first(
    scheduler: Scheduler, sequence: Sequence, token: int, cached_len: int, logprob: TokenLogprob | None
) -> None:
    """Takes in the token; `cached_len`: tokens of the prompt whose pages are there or come. Its client gets
    it with the scheduler's next round."""
    assert takes_first(sequence) and not sequence.is_finished and sequence.slot < 0, "it has begun"
    scheduler.early.append(scheduler.results.take_first(sequence, token, cached_len, logprob))
    scheduler.generated_tokens += 1
