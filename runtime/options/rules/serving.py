"""Rules on the interface of the server: keys, names, paths, tenants, labels and histograms of metrics."""

from re import fullmatch

from runtime.devices.facts import DeviceFacts
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.media_config import sees_whole_images
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag
from runtime.options.table import by_name

# options of HTTP that gRPC does not serve: web pages, proxies, files, metrics, chats and other routes
HTTP_ONLY = (
    "fastapi_root_path",
    "max_total_body_bytes",
    "max_connections",
    "allowed_hosts",
    "enable_h2c",
    "cors_origins",
    "file_storage_path",
    "stream_interval",
    "stream_output",
    "enable_cache_report",
    "chat_template",
    "hf_chat_template_name",
    "completion_template",
    "reasoning_parser",
    "tool_call_parser",
    "sampling_defaults",
    "multi_item_scoring_delimiter",
    "ssl_keyfile_password",
)

# labels of metrics/table.py
OWN_LABELS = frozenset(
    {"le", "layer", "label", "limit", "process", "reason", "status", "tenant", "event", "way"}
)


def served_name_is_possible(options: Values) -> str | None:
    """The served model name is a word without a colon: requests name an adapter as MODEL:ADAPTER."""
    if not options["served_model_name"].strip():
        return "--served-model-name is empty; give the name that clients use, or leave it out"
    if ":" in options["served_model_name"]:
        return (
            f"--served-model-name {options['served_model_name']} holds a colon, which stands between model "
            "and adapter; choose another name"
        )
    return None


def keys_fit_a_header(options: Values) -> str | None:
    """API keys can be sent in a header. The sentence does not contain the key."""
    for name in ("api_key", "admin_api_key"):
        keys = (options[name],) if isinstance(options[name], str) else options[name] or ()
        if any(not key or not all("!" <= char <= "~" for char in key) for key in keys):
            return (
                f"{flag(name)} is empty, or has spaces or characters beyond ASCII, which headers can't "
                "carry; choose another key"
            )
    return None


def root_path_is_a_path(options: Values) -> str | None:
    """--fastapi-root-path begins with a slash and does not end with one."""
    path = options["fastapi_root_path"]
    if path and (not path.startswith("/") or path.endswith("/")):
        return f"--fastapi-root-path {path} must begin with / and not end with it; give a path like /llm"
    return None


def origins_have_no_path(options: Values) -> str | None:
    """--cors-origins are as browsers send them: a scheme and a host, and no slash at the end."""
    for origin in options["cors_origins"] or ():
        if origin not in ("*", "null") and not fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            return (
                f"--cors-origins {origin} is no origin, and no page would have it; give scheme and host "
                "without a path, like https://app.example"
            )
    return None


def hosts_are_names(options: Values) -> str | None:
    """--allowed-hosts are names or addresses, without a scheme, a port or a pattern."""
    names = options["allowed_hosts"]
    for name in () if names == "auto" else names:
        if name != "*" and not fullmatch(r"[\w.-]+|\[?[0-9a-fA-F.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]?", name):
            return (
                f"--allowed-hosts {name} is no name of a host, and no request would have it; give names "
                "without scheme, port and pattern, like llm.example"
            )
    return None


def grpc_serves_no_http(options: Values) -> str | None:
    """Options that only HTTP has are not set together with --grpc-mode."""
    table = by_name()
    idle = [
        table[name].flag
        for name in HTTP_ONLY
        if options["grpc_mode"] and options[name] != table[name].default
    ]
    return f"{', '.join(idle)}: no effect on gRPC; leave that out, or --grpc-mode" if idle else None


def images_need_an_encoder(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--enable-multimodal is given for models whose encoder there is."""
    if plan.model.enable_multimodal and model.media is None:
        return (
            "--enable-multimodal: this runtime has no encoder of this model, and serves its text alone; "
            "leave it out"
        )
    return None


def whole_images_go_through(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Where the tokens of an image attend to all of them, a step has room for an image, and attention knows
    it."""
    encoder = model.media
    if not plan.model.enable_multimodal or not sees_whole_images(encoder):
        return None
    why = ", in which all tokens see each other; or set --enable-multimodal false"
    count, what = plan.model.context_length, "a prompt, as many as --context-length"
    if isinstance(encoder, Gemma3Encoder):
        count, what = encoder.num_rows, "an image"
    if plan.schedule.max_step_tokens < count:
        return (
            f"--chunked-prefill-size {plan.schedule.max_step_tokens} must be at least the {count} tokens of "
            f"{what}{why}"
        )
    if plan.parallel.attention_context_parallel_size > 1:
        return f"--attention-context-parallel-size must be 1 for images of this model{why}"
    return None


def labels_have_names(options: Values) -> str | None:
    """Labels of --extra-metric-labels and of requests are valid Prometheus names, do not clash with ours or
    each other, and have string values."""
    labels = options["extra_metric_labels"] or {}
    of_requests = options["tokenizer_metrics_allowed_custom_labels"] or ()
    for option, names, taken in (
        ("--extra-metric-labels", labels, OWN_LABELS),
        ("--tokenizer-metrics-allowed-custom-labels", of_requests, OWN_LABELS | set(labels)),
    ):
        wrong = [
            name
            for name in names
            if not fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name in taken or name.startswith("__")
        ]
        if wrong:
            return (
                f"{option}: {', '.join(wrong)} cannot be a label (letters, digits and _, and none "
                f"of {', '.join(sorted(taken))})"
            )
    if words := [name for name, value in labels.items() if not isinstance(value, str)]:
        return f"--extra-metric-labels: the value of {', '.join(words)} must be a string"
    return None


def bounds_have_a_form(options: Values) -> str | None:
    """Histogram bounds of token counts have one of the three forms."""
    problems = [
        f"{flag(name)} {problem}"
        for name in ("prompt_tokens_buckets", "generation_tokens_buckets")
        if (problem := _bounds_problem(options[name] or ("default",)))
    ]
    return "; ".join(problems) or None


def _bounds_problem(words: tuple[str, ...]) -> str | None:
    """`default`, `tse MIDDLE BASE COUNT` (exponential on both sides of the middle) or `custom BOUND ...`."""
    form, rest = words[0], words[1:]
    try:
        numbers = [float(word) for word in rest]
    except ValueError:
        return f"takes numbers after {form}, not {' '.join(rest)}"
    if form == "default":
        return "takes nothing after default" if rest else None
    if form == "tse":
        is_right = len(numbers) == 3 and numbers[0] > 0 and numbers[1] > 1 and numbers[2] >= 1
        return None if is_right else "takes a middle above 0, a base above 1 and a count after tse"
    if form == "custom":
        is_right = bool(numbers) and len(set(numbers)) == len(numbers) and min(numbers) >= 0
        return None if is_right else "takes different bounds of 0 and above after custom"
    return f"begins with default, tse or custom, not with {form}"


def tenant_weights_are_positive(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Weights of tenants are positive numbers."""
    wrong = [
        name
        for name, weight in plan.schedule.fair_share_weights.items()
        if not (isinstance(weight, int | float) and 0 < weight < 1e9)
    ]
    if wrong:
        return (
            f"--fair-share-weights gives {wrong[0]!r} no positive number; give each tenant a weight like 2 "
            "or 0.5"
        )
    return None


def bounded_steps_have_chunks(options: Values) -> str | None:
    """Only prompts that are split can keep steps short."""
    bound = options["max_step_ms"]
    if bound == "auto" or not bound or options["chunked_prefill_size"] != -1:
        return None
    return (
        f"{flag('max_step_ms')} {bound:g} bounds no step while {flag('chunked_prefill_size')} -1 keeps "
        "prompts whole; leave one of them out"
    )


OPTION_RULES: tuple[OptionRule, ...] = (
    bounded_steps_have_chunks,
    served_name_is_possible,
    keys_fit_a_header,
    root_path_is_a_path,
    origins_have_no_path,
    hosts_are_names,
    grpc_serves_no_http,
    labels_have_names,
    bounds_have_a_form,
)

PLAN_RULES: tuple[PlanRule, ...] = (
    tenant_weights_are_positive,
    images_need_an_encoder,
    whole_images_go_through,
)
