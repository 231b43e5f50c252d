"""Every metric of the runtime, declared once. Units are in the names: seconds, bytes, tokens, pages.

metrics = Metrics()
metrics.generated_tokens.add(64)
metrics.finished["stop"] += 1
metrics.step_s.observe(0.004)
metrics.render()                Prometheus text
"""

import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.messages.requests import FinishReason
from runtime.metrics.instruments import Counter, Gauge, Histogram, Info, Instrument, Labelled, render
from runtime.metrics.tier_table import TierMetrics
from runtime.scheduling.lora_slots import LoraSlots

DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)
DELAY_STEPS = (1, 2, 5, 10, 20, 30, 50, 100)
DELAY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
LENGTH = (
    1,
    10,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
)
Bounds = Sequence[float] | None


class Buckets(Struct, frozen=True, kw_only=True):
    """Histogram bounds; None: the usual ones."""

    delay_steps: Bounds = None
    delay_s: Bounds = None
    ttft_s: Bounds = None
    itl_s: Bounds = None
    e2e_s: Bounds = None
    prompt_length: Bounds = None
    answer_length: Bounds = None


USUAL = Buckets()


class Metrics(TierMetrics):
    """Plain attributes: counters have `add`, gauges `set`, histograms `observe`, labelled ones are indexed by
    the label's value."""

    def __init__(self, buckets: Buckets = USUAL) -> None:
        self.labelled: list[Instrument] = []  # figures of requests by labels of their clients
        self._define_load()
        self._define_outcomes()
        self._define_delays(buckets)
        self._define_storage()
        self._define_transfers()
        self._define_stored_objects()
        self._define_requests(buckets)
        self._define_steps()
        self._define_adapters()
        self._define_media()
        self._define_processes()

    def _define_load(self) -> None:
        self.running = Gauge("runtime_running_sequences", "Sequences that run now.")
        self.waiting = Gauge("runtime_waiting_requests", "Requests that wait for pages or a slot.")
        self.demand = Gauge(
            "runtime_demand_ratio", "How often open requests would fill it; above 1 some wait."
        )
        self.used_pages = Gauge(
            "runtime_used_pages", "Pages held by running sequences or by the prefix cache."
        )
        self.cached_pages = Gauge(
            "runtime_cached_pages", "Of the used pages, those that only the prefix cache holds."
        )
        self.total_pages = Gauge("runtime_pages", "Pages that there are.")
        self.page_info = Info("runtime_page_info", "Tokens of a page and number of pages, as labels.")
        self.page_usage = Gauge("runtime_page_usage_ratio", "Part of the pages that running sequences hold.")
        self.used_host_pages = Gauge(
            "runtime_host_used_pages", "Pages of host memory that hold cached pages."
        )
        self.used_window_pages = Gauge(
            "runtime_window_used_pages", "Cache pages of sliding-window layers that are not free."
        )
        self.total_window_pages = Gauge(
            "runtime_window_pages", "Cache pages that sliding-window layers have for themselves."
        )
        self.total_host_pages = Gauge("runtime_host_pages", "Pages of host memory that there are.")
        self.prompt_tokens = Counter("runtime_prompt_tokens_total", "Tokens of prompts that were admitted.")
        self.cached_tokens = Counter(
            "runtime_cached_tokens_total", "Of the prompt tokens, those found in the prefix cache."
        )
        self.loaded_tokens = Counter(
            "runtime_host_loaded_tokens_total", "Of the cached tokens, those that came back from host memory."
        )
        self.saved_pages = Counter("runtime_host_saved_pages_total", "Pages that were copied to host memory.")
        self.cache_leaks = Counter(
            "runtime_cache_leaks_total", "Pages that had no owner, or two, and are not used any more."
        )

    def _define_outcomes(self) -> None:
        self.generated_tokens = Counter("runtime_generated_tokens_total", "Tokens that were sampled.")
        self.requests = Counter("runtime_requests_total", "Requests that were taken in.")
        self.refused = Labelled(
            "runtime_refused_requests_total", "Requests that were refused, by HTTP status.", label="status"
        )
        self.finished = Labelled(
            "runtime_finished_sequences_total",
            "Sequences that ended, by reason.",
            label="reason",
            values=tuple(reason.value for reason in FinishReason),
        )
        self.aborted = Counter(
            "runtime_aborted_requests_total", "Requests whose client left or asked to stop."
        )
        self.failed = Counter(
            "runtime_failed_requests_total", "Requests that were given up after a death of the ranks."
        )
        self.standby_ranks = Gauge(
            "runtime_standby_ranks", "Sets of standby ranks that could replace a generation now."
        )
        self.rank_restarts = Counter(
            "runtime_rank_restarts_total", "Generations of ranks that were started after a death."
        )
        self.moved_requests = Counter(
            "runtime_moved_requests_total", "Requests that went on with another replica after a death."
        )
        self.recovered_requests = Counter(
            "runtime_recovered_requests_total", "Running requests that went on after a death of the ranks."
        )
        self.preemptions = Counter(
            "runtime_preemptions_total", "Sequences that gave their pages up and were computed again."
        )
        self.priority_preemptions = Counter(
            "runtime_priority_preemptions_total", "Of the preemptions, those for a better priority."
        )
        self.aged = Counter(
            "runtime_aged_admissions_total",
            "Sequences that were admitted because they had been overtaken too often.",
        )
        self.held_back = Counter(
            "runtime_held_back_steps_total", "Steps in which long prompts left room for others."
        )
        self.timeouts = Labelled(
            "runtime_timeouts_total",
            "Requests whose time was up, in the queue or in total.",
            label="limit",
            values=("queue", "total"),
        )
        self.tenant_tokens = Labelled(
            "runtime_tenant_tokens_total", "Tokens computed for each tenant (--fair-share).", label="tenant"
        )
        self.kv_event_batches = Counter(
            "runtime_kv_event_batches_total", "Batches of cache events that were published."
        )
        self.kv_event_drops = Counter(
            "runtime_kv_event_drops_total", "Batches that were not, because too many waited."
        )

    def _define_delays(self, buckets: Buckets) -> None:
        self.delays = Labelled(
            "runtime_prefill_delays_total",
            "Times that newcomers were let in by the prefill delayer, by reason.",
            label="reason",
            values=("full", "watermark", "limit"),
        )
        self.delay_steps = Histogram(
            "runtime_prefill_delay_steps",
            "Steps that newcomers were held back before.",
            bounds(buckets.delay_steps, DELAY_STEPS),
        )
        self.delay_s = Histogram(
            "runtime_prefill_delay_seconds",
            "Time that newcomers were held back before.",
            bounds(buckets.delay_s, DELAY_S),
        )

    def _define_stored_objects(self) -> None:
        self.stored_object_failures = Labelled(
            "runtime_stored_object_failures_total",
            "Tasks of stored objects that failed by an error of the server, by kind.",
            label="kind",
            values=("batch", "response", "response_writer", "uploads"),
        )
        self.stored_object_disk_errors = Labelled(
            "runtime_stored_object_disk_errors_total",
            "Times that stored objects could not be read or written, by reason.",
            label="reason",
            values=("full", "unavailable"),
        )
        self.quarantined_files = Counter(
            "runtime_quarantined_files_total", "Damaged parts of stored objects that are not served."
        )

    def _define_requests(self, buckets: Buckets) -> None:
        self.queue_s = Histogram("runtime_queue_seconds", "From arrival to admission.", REQUEST_S)
        self.ttft_s = Histogram(
            "runtime_time_to_first_token_seconds",
            "From arrival to the first token.",
            ascending(buckets.ttft_s, REQUEST_S),
        )
        self.itl_s = Histogram(
            "runtime_inter_token_latency_seconds",
            "Between one token of a sequence and its next.",
            ascending(buckets.itl_s, TOKEN_S),
        )
        self.e2e_s = Histogram(
            "runtime_request_seconds",
            "From arrival to the end of a request.",
            ascending(buckets.e2e_s, REQUEST_S),
        )
        self.prompt_length = Histogram(
            "runtime_prompt_length_tokens",
            "Tokens of prompts (--collect-tokens-histogram).",
            ascending(buckets.prompt_length, LENGTH),
        )
        self.answer_length = Histogram(
            "runtime_answer_length_tokens",
            "Tokens of all answers to a request (the same).",
            ascending(buckets.answer_length, LENGTH),
        )

    def _define_steps(self) -> None:
        self.steps = Counter("runtime_steps_total", "Steps whose results came back.")
        self.step_s = Histogram("runtime_step_seconds", "Time that the ranks spent on a step.", STEP_S)
        self.draft_tokens = Counter("runtime_draft_tokens_total", "Drafts that steps verified.")
        self.accepted_drafts = Counter(
            "runtime_accepted_draft_tokens_total", "Of the drafts, those that became tokens."
        )
        self.drafted = Histogram(
            "runtime_drafts_of_a_row", "Drafts of a sequence that one step verified.", DRAFTS
        )
        self.accepted = Histogram(
            "runtime_accepted_drafts_of_a_row",
            "Of these, accepted ones: rows above n here by rows above n there is the acceptance at n + 1.",
            DRAFTS,
        )
        self.captured_sizes = Gauge(
            "runtime_captured_sizes", "Numbers of sequences whose decode steps are graphs."
        )
        self.captured_verifies = Gauge(
            "runtime_captured_verify_sizes", "Numbers of sequences whose steps that verify drafts are graphs."
        )
        self.captured_piecewise = Gauge(
            "runtime_captured_piece_sizes",
            "Numbers of tokens for which steps with prompts are piecewise graphs.",
        )
        self.capture_s = Counter("runtime_capture_seconds_total", "Time that captures of steps took.")
        self.capture_failures = Counter("runtime_capture_failures_total", "Captures of steps that failed.")
        self.expert_choices = Labelled(
            "runtime_expert_choices_total", "Tokens times experts of each, by layer.", label="layer"
        )
        self.expert_imbalance = Labelled(
            "runtime_expert_imbalance",
            "Tokens of the busiest expert, by those of the average one.",
            label="layer",
            kind="gauge",
        )
        self.expert_rank_imbalance = Labelled(
            "runtime_expert_rank_imbalance",
            "The same of the groups of ranks that hold experts.",
            label="layer",
            kind="gauge",
        )

    def _define_media(self) -> None:
        self.encoded_media = Counter("runtime_media_encoded_total", "Images that the ranks encoded.")
        self.reused_media = Counter("runtime_media_reused_total", "Uses of encodings made for earlier steps.")
        self.kept_media_rows = Gauge("runtime_media_kept_rows", "Rows of encodings that the ranks keep.")
        kinds = tuple(kind.value for kind in MediaKind)
        self.media_requests = Labelled(
            "runtime_media_requests_total",
            "Requests with images, videos or sounds, by kind.",
            label="kind",
            values=kinds,
        )
        self.media_files = Labelled(
            "runtime_media_files_total", "Files that were loaded, by kind.", label="kind", values=kinds
        )
        self.media_bytes = Labelled(
            "runtime_media_bytes_total", "Bytes of these files, by kind.", label="kind", values=kinds
        )
        self.known_media = Counter(
            "runtime_media_known_total", "Files that came before and were not decoded again."
        )
        self.media_fetch_s = Histogram(
            "runtime_media_fetch_seconds", "Until all bytes of a file were there.", REQUEST_S
        )
        self.media_decode_s = Histogram("runtime_media_decode_seconds", "Decoding of a file.", REQUEST_S)
        self.media_encode_s = Histogram(
            "runtime_media_encode_seconds", "Time of the encoder on what a step needs.", STEP_S
        )

    def _define_adapters(self) -> None:
        self.loaded_adapters = Gauge("runtime_loaded_adapters", "LoRA adapters that requests may ask for.")
        self.adapter_info = Info("runtime_adapter_info", "LoRA adapters in use and waited for, as labels.")
        self.adapter_slots = Gauge("runtime_adapter_slots", "LoRA slots on the device.")
        self.taken_adapter_slots = Gauge("runtime_adapter_taken_slots", "LoRA slots that hold an adapter.")
        self.used_adapter_slots = Gauge(
            "runtime_adapter_used_slots", "LoRA slots that running sequences use."
        )
        self.waiting_for_adapter_slots = Gauge(
            "runtime_adapter_waiting_sequences", "Sequences that wait for a LoRA slot."
        )
        self.adapter_loads = Counter(
            "runtime_adapter_loads_total", "Times that an adapter was copied to a LoRA slot."
        )
        self.adapter_evictions = Counter(
            "runtime_adapter_evictions_total", "Times that an adapter was evicted from its LoRA slot."
        )

    def set_lora_slots(self, num_loaded: int, lora_slots: Sequence[LoraSlots]) -> None:
        """Sets the metrics of adapters: `num_loaded` adapters, and the slots of each scheduler."""
        self.loaded_adapters.set(num_loaded)
        self.adapter_slots.set(sum([slots.config.num_lora_slots for slots in lora_slots]))
        self.taken_adapter_slots.set(sum([slots.num_taken for slots in lora_slots]))
        self.used_adapter_slots.set(sum([len(slots.used_adapters) for slots in lora_slots]))
        self.waiting_for_adapter_slots.set(sum([len(slots.waiting) for slots in lora_slots]))
        self.adapter_loads.value = sum([slots.num_placed for slots in lora_slots])
        self.adapter_evictions.value = sum([slots.num_evicted for slots in lora_slots])

    def _define_processes(self) -> None:
        self.rss_bytes = Labelled(
            "runtime_resident_bytes", "Resident memory of each process.", label="process", kind="gauge"
        )
        self.cpu_s = Labelled(
            "runtime_cpu_seconds_total", "User and system CPU time of each process.", label="process"
        )

    def instruments(self) -> list[Instrument]:
        """All instruments, in the order in which `render` writes them."""
        own = [value for value in vars(self).values() if not isinstance(value, list)]
        return [*own, *self.labelled]

    def render(self, pids: Mapping[str, int] | None = None, labels: Mapping[str, str] | None = None) -> bytes:
        """Prometheus text. `pids` maps names of other processes to their ids; their memory and CPU time are
        reported, like those of this process; all samples have `labels`."""
        pids = {"server": os.getpid(), **(pids or {})}
        self.rss_bytes.values.clear()
        self.cpu_s.values.clear()
        for name, pid in pids.items():
            if (usage := process_usage(pid)) is not None:
                self.rss_bytes[name], self.cpu_s[name] = usage
        return render(self.instruments(), labels)


def bounds(given: Bounds, usual: Sequence[float]) -> tuple[float, ...]:
    """Histogram bounds in ascending order, with 0 for requests that did not wait."""
    return tuple(sorted({0.0, *(usual if given is None else given)}))


def ascending(given: Bounds, usual: Sequence[float]) -> tuple[float, ...]:
    """Histogram bounds in ascending order; `usual` where none are given."""
    return tuple(sorted(set(usual if given is None else given)))


def process_usage(pid: int) -> tuple[int, float] | None:
    """Resident bytes and CPU seconds of a process (proc(5)); None when it is gone."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[21]) * resource.getpagesize(), (int(fields[11]) + int(fields[12])) / ticks
