"""Metrics, traces, and where they go."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.options.declare import Amount, Count, Group, Json, option, superseded

Endpoint = A[str, Meta(pattern="^(tcp|ipc)://.+")]
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"  # of events; other machines reach an endpoint that is named only


class KVEvents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """--kv-events-config: where events of the prefix cache go. The fields are those of vLLM's and SGLang's
    option."""

    publisher: Literal["zmq", "null"] | None = None  # None: zmq if enable_kv_cache_events is true
    endpoint: Endpoint | None = None  # None: DEFAULT_ENDPOINT, which is bound
    replay_endpoint: Endpoint | None = None
    buffer_steps: Count = 10_000  # batches that can be asked for again
    hwm: Count = 100_000  # batches that may wait for one slow reader
    max_queue_size: Count = 100_000  # batches that may wait to be published
    topic: str = ""
    enable_kv_cache_events: bool | None = None  # a switch of vLLM, in addition to publisher

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        if self.enable_kv_cache_events is None:
            return self.publisher == "zmq"
        return self.enable_kv_cache_events and self.publisher != "null"


class Observe(Group, frozen=True, kw_only=True):
    """Metrics and tracing"""

    enable_metrics: A[bool, superseded("Serve Prometheus metrics.", "/metrics always answers.")] = False
    enable_metrics_for_all_schedulers: A[
        bool,
        superseded(
            "Metrics from every scheduler, not only from the first.",
            "there is one process with one set of metrics for all of them.",
        ),
    ] = False
    tokenizer_metrics_custom_labels_header: A[
        str, option("Request header with further labels for the metrics, as a JSON object.")
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: A[
        tuple[str, ...] | None,
        option(
            "Labels that this header may set.",
            aliases=("--tokenizer-metrics-allowed-customer-labels",),
            note="each has at most 64 values, others count as `other`; figures of requests by these labels "
            "have names of their own, runtime_labelled_...",
        ),
    ] = None
    extra_metric_labels: A[Json | None, option("Labels that all metrics carry, as JSON.")] = None
    bucket_time_to_first_token: A[
        tuple[Amount, ...] | None, option("Histogram bounds of the time to the first token, in seconds.")
    ] = None
    bucket_inter_token_latency: A[
        tuple[Amount, ...] | None, option("Histogram bounds of the time between tokens, in seconds.")
    ] = None
    bucket_e2e_request_latency: A[
        tuple[Amount, ...] | None, option("Histogram bounds of the time of whole requests, in seconds.")
    ] = None
    collect_tokens_histogram: A[bool, option("Histograms of prompt and output lengths.")] = False
    prompt_tokens_buckets: A[
        tuple[str, ...] | None,
        option("Bounds of the prompt length histogram: default, tse MIDDLE BASE COUNT, or custom BOUND ..."),
    ] = None
    generation_tokens_buckets: A[
        tuple[str, ...] | None, option("Bounds of the output length histogram, in the same form.")
    ] = None
    kv_events_config: A[
        KVEvents | None,
        option(
            "Publish over ZeroMQ what enters and leaves the prefix cache, for routers; JSON, see "
            "docs/kv_events.md."
        ),
    ] = None
    enable_trace: A[
        bool, option("Trace requests with OpenTelemetry.", note="needs the extra `trace`; see docs/logs.md")
    ] = False
    otlp_traces_endpoint: A[
        str,
        option(
            "Collector of the traces: host:port of OTLP over gRPC; with https:// by TLS.",
            aliases=("--oltp-traces-endpoint",),
        ),
    ] = "localhost:4317"
    export_metrics_to_file: A[bool, option("Write the figures of each request to files, a line each.")] = (
        False
    )
    export_metrics_to_file_dir: A[
        str | None, option("Folder of these files; there is one for each hour.")
    ] = None
    enable_expert_distribution_metrics: A[
        bool, option("Metrics of how evenly tokens spread over experts.")
    ] = False
