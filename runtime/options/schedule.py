"""How sequences become steps."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.options.declare import Amount, Auto, Count, Group, Seconds, Whole, option, planned, superseded

ChunkTokens = A[int, Meta(ge=-1)]


class Schedule(Group, frozen=True, kw_only=True):
    """Scheduling"""

    max_running_requests: A[Count | Auto, option("Sequences that run at once; further ones wait.")] = "auto"
    max_queued_requests: A[Whole | Auto, option(
        "Requests that may wait; above it the answer is 429.",
        note="auto is 16384 instead of no bound: enough for a benchmark that sends all at once, and memory stays bounded")] = "auto"
    chunked_prefill_size: A[ChunkTokens | Auto, option(
        "Most prompt tokens of one step, of all prompts together; -1 computes each prompt in one step.")] = "auto"
    max_prefill_tokens: A[Count, option(
        "Most prompt tokens of one step; without chunks at least the context length, so that every prompt fits.")] = 16384
    prefill_max_requests: A[Count | None, planned("Most prompts of one step.")] = None
    enable_dynamic_chunking: A[bool, planned("Let the chunk size follow the measured time of a step.")] = False
    schedule_policy: A[Literal["lpm", "random", "fcfs", "dfs-weight", "lof", "priority", "routing-key"], option(
        "Order in which waiting requests are taken: first come, first served.",
        later=("lpm", "random", "dfs-weight", "lof", "priority", "routing-key"))] = "fcfs"
    enable_priority_scheduling: A[bool, planned("Take waiting requests by their priority.")] = False
    abort_on_priority_when_disabled: A[bool, planned("Refuse requests with a priority while priorities are off.")] = False
    schedule_low_priority_values_first: A[bool, planned("The lower number is the higher priority.")] = False
    priority_scheduling_preemption_threshold: A[Count, planned(
        "Difference of priority from which a waiting request preempts a running one.")] = 10
    schedule_conservativeness: A[Amount, superseded(
        "How much room to keep for the growth of running sequences.",
        "pages are reserved exactly, and a sequence that finds none is computed again later.")] = 1.0
    enable_prefill_delayer: A[bool, planned("Hold prompts back until all data-parallel replicas have some.")] = False
    prefill_delayer_max_delay_passes: A[Count, planned("Steps that a prompt is held back at most.")] = 30
    prefill_delayer_token_usage_low_watermark: A[Amount | None, planned("Share of used cache below which nothing is held back.")] = None
    prefill_delayer_forward_passes_buckets: A[tuple[Amount, ...] | None, planned(
        "Histogram bounds of the steps that prompts were held back.")] = None
    prefill_delayer_wait_seconds_buckets: A[tuple[Amount, ...] | None, planned(
        "Histogram bounds of the seconds that prompts were held back.")] = None
    enable_mixed_chunk: A[bool, superseded("Prompts and decodes share a step.", "every step mixes them.")] = False
    disable_overlap_schedule: A[bool, option("One step in flight instead of two: submit a step only when the last one is back.")] = False
    num_continuous_decode_steps: A[Count, superseded(
        "Decode steps between two looks at the waiting queue.",
        "steps are submitted ahead of their results, so looking at the queue costs the device no time.")] = 1
    scheduler_recv_interval: A[Count, superseded(
        "Steps between two looks at incoming requests.", "requests reach the scheduler in memory, and looking costs nothing.")] = 1
    random_seed: A[Whole | Auto, option("Seed of the seeds of requests that give none; auto draws one at start.")] = "auto"
    sleep_on_idle: A[bool, superseded(
        "Use no CPU while there is nothing to do.", "an idle server and its ranks always sleep in the kernel.")] = False
    watchdog_timeout: A[Seconds, option(
        "Seconds with a step in flight and none done after which ranks count as dead and are started again; 0: never.")] = 300.0
    soft_watchdog_timeout: A[Amount | None, planned("Seconds without a finished step after which the state is dumped to the log.")] = None
