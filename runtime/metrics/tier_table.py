"""Metrics of what lies beyond the device: storage, and pages from other servers."""

from runtime.metrics.instruments import Counter, Gauge, Labelled


class TierMetrics:
    """Part of Metrics."""

    def _define_storage(self) -> None:
        self.storage_pages = Labelled(
            "runtime_storage_pages_total",
            "Pages of the storage tier, by what became of them.",
            label="event",
            values=("written", "read", "missed", "corrupt", "dropped", "evicted"),
        )
        self.storage_states = Labelled(
            "runtime_storage_states_total",
            "States of recurrent layers in the storage tier, by what became of them.",
            label="event",
            values=("written", "read", "missed", "corrupt", "dropped", "evicted"),
        )
        self.storage_bytes = Labelled(
            "runtime_storage_bytes_total", "Bytes to and from storage.", label="way", values=("write", "read")
        )
        self.storage_s = Labelled(
            "runtime_storage_seconds_total",
            "Time of worker threads for storage.",
            label="way",
            values=("write", "read"),
        )
        self.storage_errors = Counter(
            "runtime_storage_errors_total", "Times that storage could not be read or written."
        )
        self.storage_fetched_tokens = Counter(
            "runtime_storage_fetched_tokens_total", "Tokens whose pages came from storage."
        )
        self.storage_timeouts = Counter(
            "runtime_storage_timeouts_total", "Requests that did not wait any longer for storage."
        )
        self.storage_wait_s = Counter(
            "runtime_storage_wait_seconds_total", "Time that requests waited for storage."
        )
        self.storage_held_bytes = Gauge(
            "runtime_storage_held_bytes", "Bytes of all pages in storage, as far as this server knows."
        )

    def _define_transfers(self) -> None:
        self.transfer_pages = Labelled(
            "runtime_transfer_pages_total",
            "Pages of prompts to and from other servers.",
            label="way",
            values=("sent", "received"),
        )
        self.transfer_bytes = Labelled(
            "runtime_transfer_bytes_total", "Bytes of these pages.", label="way", values=("sent", "received")
        )
        self.transfer_fetches = Counter(
            "runtime_transfer_fetches_total", "Prompts whose pages another server was asked for."
        )
        self.transfer_failures = Counter(
            "runtime_transfer_failures_total", "Of these, prompts of which pages were computed here instead."
        )
        self.transfer_refused = Counter(
            "runtime_transfer_refused_total", "Questions of other servers for pages that were refused."
        )
        self.transfer_wait_s = Counter(
            "runtime_transfer_wait_seconds_total", "Time that requests waited for pages of another server."
        )

    def reset_storage(self) -> None:
        """Sets the metrics of the storage tier to zero, so that each storage actor can add its totals."""
        for labelled in (self.storage_pages, self.storage_states, self.storage_bytes, self.storage_s):
            labelled.values.update(dict.fromkeys(labelled.values, 0.0))
        self.storage_errors.value = self.storage_fetched_tokens.value = 0.0
        self.storage_timeouts.value = self.storage_wait_s.value = self.storage_held_bytes.value = 0.0
