"""CPU time of text on the event loop: a streamed token through the detokenizer, a prompt through the
tokenizer, and a vocabulary at start.

    python -m bench.detokenize

`us_per_token` of the actor covers a step without the sink's own work: lookup, text, stop strings,
Delta, the call of push. The vocabulary is trained on this package's source, so that the text is real and no
file is needed.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from time import thread_time
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import runtime
from bench.record import record
from runtime.actors.channels import Channel
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.open_requests import OpenRequests
from runtime.actors.tokenizer import INLINE_CHARS
from runtime.errors import RequestError
from runtime.messages.requests import Delta, FinishReason, Request, TokenLogprob
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Ended, Opened, StepTokens, ToDetokenizer
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary

STREAMS = 64
STEPS = 512
REPEATS = 7
FOREIGN = "Die Größe der Bäume überraschte alle. 天気がいいから散歩しましょう。 Привет, мир! 🦜🌲🍂 " * 20


class CountingSink:
    """A sink that counts deltas and nothing else."""

    def __init__(self) -> None:
        self.num_deltas = 0

    def push(self, delta: Delta) -> None:
        """Counts a delta."""
        self.num_deltas += 1

    def fail(self, error: RequestError) -> None:
        """Raises the error: no request may fail."""
        raise error


def source() -> list[str]:
    """Texts of the Python files of this package."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(runtime.__file__).parent.rglob("*.py"))]


def train() -> Tokenizer:
    """A byte-level BPE tokenizer, trained on this package."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        source(), trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def best_s(work: Callable[[], Any]) -> float:
    """CPU time of the quickest of several runs."""
    times = []
    for _ in range(REPEATS):
        begin = thread_time()
        work()
        times.append(thread_time() - begin)
    return min(times)


def figure(value: float) -> float:
    """A figure with three digits."""
    return round(value, 3)


def stream_us(vocabulary: Vocabulary, ids: Sequence[int]) -> float:
    """Microseconds a token of a text stream."""

    def work() -> None:
        add = vocabulary.stream([1]).add
        for i in ids:
            add(i)

    return figure(best_s(work) / len(ids) * 1e6)


def actor_us(vocabulary: Vocabulary, ids: Sequence[int], params: SamplingParams) -> float:
    """Microseconds a token of one of 64 streams, from StepTokens to the return of push, with opening and
    ending."""
    steps = list(islice(cycle(ids), STEPS))
    sequence_ids = list(range(STREAMS))
    sinks = [CountingSink() for _ in sequence_ids]
    inbox = Channel[ToDetokenizer](1)
    open_requests = OpenRequests()
    actor = DetokenizerActor(vocabulary, open_requests, inbox, lambda message: None)
    opened = [
        Opened(Request(id=str(i), prompt_ids=[1], params=params, seed=0, arrival_s=0.0), [i])
        for i in sequence_ids
    ]
    messages = [StepTokens(sequence_ids, [token] * STREAMS, [], {}, {}) for token in steps]
    if params.logprobs:
        for message in messages:
            message.logprobs.update({i: TokenLogprob(message.token_ids[i], -1.0, []) for i in sequence_ids})
    last = StepTokens([], [], [Ended(i, FinishReason.LENGTH, None, 0) for i in sequence_ids], {}, {})

    def work() -> None:
        for sink, message in zip(sinks, opened, strict=True):
            open_requests.open(message.request.id, sink)
            actor.handle(message)
        for message in messages:
            actor.handle(message)
        actor.handle(last)

    seconds = best_s(work)
    inbox.discard()
    assert all(sink.num_deltas == REPEATS * (STEPS + 1) for sink in sinks), "every token must reach its sink"
    return figure(seconds / (STREAMS * STEPS) * 1e6)


def large_vocabulary_ms() -> float:
    """Making the tables of a vocabulary as large as today's (128 k tokens), without reading its file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in alphabet for b in alphabet]
    tokens = [*alphabet, *pairs, *(pair + alphabet[65] for pair in pairs)][:128_000]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return figure(best_s(lambda: Vocabulary(tokenizer, TokenizerFiles())) * 1e3)


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    vocabulary = Vocabulary(train(), TokenizerFiles())
    text = "".join(source())[:65536]
    plain, foreign = vocabulary.encode(text), vocabulary.encode(FOREIGN)
    results = {
        "stream_us_per_token": {
            "source": stream_us(vocabulary, plain),
            "half_characters": stream_us(vocabulary, foreign),
        },
        "actor_us_per_token": {
            "plain": actor_us(vocabulary, plain, SamplingParams()),
            "half_characters": actor_us(vocabulary, foreign, SamplingParams()),
            "two_stop_strings": actor_us(vocabulary, plain, SamplingParams(stop=("\n\n\n\n", "</answer>"))),
            "logprobs": actor_us(vocabulary, plain, SamplingParams(logprobs=True)),
        },
        "encode_ms": {
            str(n): figure(best_s(lambda n=n: vocabulary.encode(text[:n])) * 1e3)
            for n in (100, 1000, INLINE_CHARS, 65536)
        },
        "tables_128k_ms": large_vocabulary_ms(),
    }
    for name, value in results.items():
        print(f"{name:24}{value}")
    record("detokenize", {"streams": STREAMS, "steps": STEPS} | results)


if __name__ == "__main__":
    main()
