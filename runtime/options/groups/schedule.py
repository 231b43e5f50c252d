"""How sequences become steps."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.devices.facts import DeviceFacts
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.options.declare import (
    Amount,
    Auto,
    Count,
    Derived,
    Fraction,
    Group,
    Json,
    Seconds,
    Whole,
    option,
    superseded,
)
from runtime.options.facts import MachineFacts, ModelFacts

ChunkTokens = A[int, Meta(ge=-1)]
Above = A[float, Meta(gt=0)]

CHUNKS_OF_TEXTS = 2  # chunks of tokens in a step of texts to embed: no decode waits for such a step

MOST_SOUNDS = 16  # sequences at once that attend to a sound each, where no option says otherwise


class Schedule(Group, frozen=True, kw_only=True):
    """Scheduling"""

    max_running_requests: A[Count | Auto, option("Sequences that run at once; further ones wait.")] = "auto"
    max_queued_requests: A[
        Whole | Auto,
        option(
            "Requests that may wait; above it the answer is 429.",
            note="auto is 16384 instead of no bound: enough for a benchmark that sends all at once, and "
            "memory stays bounded",
        ),
    ] = "auto"
    chunked_prefill_size: A[
        ChunkTokens | Auto,
        option(
            "Most prompt tokens of one step, of all prompts together; -1 computes each prompt in one step."
        ),
    ] = "auto"
    max_prefill_tokens: A[
        Count,
        option(
            "Most prompt tokens of one step; without chunks at least the context length, so that every "
            "prompt fits."
        ),
    ] = 16384
    prefill_max_requests: A[Count | None, option("Most prompts of one step.")] = None
    enable_dynamic_chunking: A[
        bool,
        option(
            "Chunks deep in a long prompt get smaller, so that each takes as long as the first.",
            note="how much smaller is learnt from the measured times of steps",
        ),
    ] = False
    max_step_ms: A[
        Amount | Auto,
        option(
            "Longest step that prompts may make while sequences decode, in milliseconds; 0: any.",
            note="prompts then get smaller chunks, by what steps are measured to cost; no less than a page "
            "a step, and a third of the time where decoding alone takes longer than this; images and sounds "
            "are encoded in slices of half of what is left (docs/media.md)",
        ),
    ] = "auto"
    long_prompt_share: A[
        Fraction,
        option("Part of a step's prompt tokens for long prompts (over four steps) while others wait."),
    ] = 0.5
    schedule_policy: A[
        Literal["lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key"],
        option(
            "Order in which waiting requests are taken.",
            note="fcfs: first come, first served; lpm: longest cached prefix; dfs-weight: along the tree of "
            "prefixes; lof: longest output; "
            "priority: fcfs with --enable-priority-scheduling; routing-key: the key that most running ones "
            "have",
        ),
    ] = "fcfs"
    max_overtakes: A[
        Whole,
        option(
            "Later requests that may overtake a waiting one; then its turn comes, by whatever policy. 0: "
            "any number."
        ),
    ] = 256
    fair_share: A[
        Literal["off", "key", "header"],
        option(
            "Waiting tenants get equal shares of the computed tokens.",
            note="key: a tenant is the key that it sent; header: what the header x-tenant-id names",
        ),
    ] = "off"
    fair_share_weights: A[
        Json, option("Weights of tenants for --fair-share, as JSON; 1 where none is given.")
    ] = {}
    enable_priority_scheduling: A[
        bool, option("Take waiting requests by their priority; those without one come last.")
    ] = False
    abort_on_priority_when_disabled: A[
        bool, option("Refuse requests with a priority while priorities are off.")
    ] = False
    schedule_low_priority_values_first: A[bool, option("The lower number is the higher priority.")] = False
    priority_scheduling_preemption_threshold: A[
        Count, option("Difference of priority from which a waiting request preempts a running one.")
    ] = 10
    schedule_conservativeness: A[
        Amount,
        option(
            "How much room to keep for the growth of running sequences: 1 is what recent ones took, 0 is "
            "none."
        ),
    ] = 1.0
    queue_timeout: A[
        Above | None, option("Seconds that a request may wait for its first step; then the answer is 503.")
    ] = None
    request_timeout: A[
        Above | None,
        option(
            "Seconds from a request's arrival to its end; then it ends with what it has, or with 503 if "
            "that is nothing."
        ),
    ] = None
    enable_prefill_delayer: A[
        bool,
        option(
            "Hold prompts back while others decode, until they fill a step or all data-parallel replicas "
            "have some.",
            note="fewer and fuller prompt steps, so smoother streams, for a later first token",
        ),
    ] = False
    prefill_delayer_max_delay_passes: A[Count, option("Steps that a prompt is held back at most.")] = 30
    prefill_delayer_token_usage_low_watermark: A[
        Amount | None,
        option("Share of the cache used by running sequences below which nothing is held back."),
    ] = None
    prefill_delayer_forward_passes_buckets: A[
        tuple[Amount, ...] | None, option("Histogram bounds of the steps that prompts were held back.")
    ] = None
    prefill_delayer_wait_seconds_buckets: A[
        tuple[Amount, ...] | None, option("Histogram bounds of the seconds that prompts were held back.")
    ] = None
    enable_mixed_chunk: A[bool, superseded("Prompts and decodes share a step.", "every step mixes them.")] = (
        False
    )
    disable_overlap_schedule: A[
        bool, option("One step in flight instead of two: submit a step only when the last one is back.")
    ] = False
    num_continuous_decode_steps: A[
        Count,
        option(
            "Steps from one that admits prompts to the next that may, while sequences decode.",
            note="more make streams smoother and first tokens later",
        ),
    ] = 1
    scheduler_recv_interval: A[
        Count,
        superseded(
            "Steps between two looks at incoming requests.",
            "requests reach the scheduler in memory, and looking costs nothing.",
        ),
    ] = 1
    random_seed: A[
        Whole | Auto, option("Seed of the seeds of requests that give none; auto draws one at start.")
    ] = "auto"
    sleep_on_idle: A[
        bool,
        superseded(
            "Use no CPU while there is nothing to do.",
            "an idle server and its ranks always sleep in the kernel.",
        ),
    ] = False
    watchdog_timeout: A[
        Seconds,
        option(
            "Seconds with a step in flight and none done after which ranks count as dead and are started "
            "again; 0: never."
        ),
    ] = 300.0
    soft_watchdog_timeout: A[
        Amount | None, option("Seconds without a finished step after which stacks are dumped to the log.")
    ] = None


class SchedulePlan(Schedule, frozen=True, kw_only=True):
    """Scheduling settings in force."""

    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int  # tokens; -1: prompts are not split into chunks
    max_step_ms: float  # 0: no bound
    max_step_tokens: int  # most prompt tokens of one step
    random_seed: int


def max_running_requests(device: DeviceFacts, model: ModelFacts) -> Derived:
    """The number of sequences beyond which a step of the device only gets slower; fewer where each has keys
    and values of a sound."""
    if isinstance(model.media, WhisperEncoder):
        most = min(MOST_SOUNDS, device.max_running)
        return Derived(most, "each has room for keys and values of a sound in every layer")
    return Derived(device.max_running, f"more make a step of {device.name} slower, not fuller")


def max_queued_requests() -> Derived:
    """A bound on waiting requests."""
    return Derived(16384, "enough for a benchmark that sends all at once, and a bound on memory")


def chunked_prefill_size(device: DeviceFacts, model: ModelFacts) -> Derived:
    """Prompt tokens that keep the device busy for one step; -1 where a text must not be split."""
    if model.pooling is not None and model.pooling.is_whole:
        return Derived(-1, "the model must see all of a text in one step")
    return Derived(
        device.chunk_tokens, f"it keeps {device.name} busy for one step without making decodes wait long"
    )


def max_step_ms(chunked_prefill_size: int, device: DeviceFacts) -> Derived:
    """The device's bound on the time between two tokens of a stream while prompts are computed."""
    if chunked_prefill_size < 0:
        return Derived(0.0, "prompts are not split into chunks")
    if not device.step_ms:
        return Derived(0.0, f"a step of {device.name} with a full chunk is short")
    return Derived(float(device.step_ms), "streams stay about as fast as one reads, and prompts lose little")


def max_step_tokens(
    chunked_prefill_size: int,
    max_prefill_tokens: int,
    context_length: int,
    device: DeviceFacts,
    model: ModelFacts,
) -> Derived:
    """Most prompt tokens that one step computes."""
    if model.pooling is not None and model.pooling.is_whole:
        size = max(context_length, min(CHUNKS_OF_TEXTS * device.chunk_tokens, max_prefill_tokens))
        return Derived(size, f"texts together keep {device.name} busy, and the longest one fits")
    if chunked_prefill_size > 0:
        return Derived(
            min(chunked_prefill_size, max_prefill_tokens),
            "the smaller of --chunked-prefill-size and --max-prefill-tokens",
        )
    return Derived(max(max_prefill_tokens, context_length), "without chunks the longest prompt fits one step")


def random_seed(machine: MachineFacts) -> Derived:
    """A fresh seed."""
    return Derived(machine.entropy, "drawn at start")
