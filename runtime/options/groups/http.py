"""HTTP server and API: address, limits, and what clients see."""

from ipaddress import ip_address
from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.messages.sampling import MAX_TOP_LOGPROBS
from runtime.options.declare import (
    Auto,
    Count,
    Derived,
    Fraction,
    Group,
    Json,
    Port,
    Seconds,
    Whole,
    option,
    refused,
    superseded,
)

MaxLogprobs = A[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)]
ALL_INTERFACES = ("", "*")
MOST_CONNECTIONS = 8192  # each may hold some 200 KiB of requests and answers that wait
OTHER_FILES = 256  # open files that are no connections: libraries, logs, stored objects, listening sockets
FILES_OF_A_RANK = 64  # rings, pipes and their doubles while the next generation starts
LEAST_CONNECTIONS = 32
LEAST_TOTAL_BODY_BYTES = 512 * 2**20


class Http(Group, frozen=True, kw_only=True):
    """HTTP server"""

    host: A[str, option("Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1"
    port: A[Port, option("Port to listen on; 0 takes a free one and logs it.")] = 30000
    max_body_bytes: A[Count, option("Largest request body; above it the answer is 413.")] = 16 * 2**20
    max_response_bytes: A[
        Count,
        option(
            "Most bytes of log probabilities of alternatives, and of hidden states, that one request may ask "
            "for."
        ),
    ] = 64 * 2**20
    max_total_body_bytes: A[
        Count | Auto,
        option("Most bytes of all request bodies held at once; above it the answer is 503, try again."),
    ] = "auto"
    max_connections: A[
        Count | Auto, option("Most connections; above it only health checks are answered, others get 503.")
    ] = "auto"
    allowed_hosts: A[
        tuple[str, ...] | Auto,
        option(
            "Names by which clients may address the server (Host header); * for any.",
            note="keyless servers on this machine check by default, so that web pages cannot reach them "
            "through names of their own (DNS rebinding); addresses are always allowed",
        ),
    ] = "auto"
    shutdown_timeout: A[Seconds, option("Seconds that running requests may take to end after SIGTERM.")] = (
        30.0
    )
    fastapi_root_path: A[str, option("Path prefix under which a proxy serves the API.")] = ""
    cors_origins: A[
        tuple[str, ...] | None, option("Origins of web pages whose scripts may use the API; * for all.")
    ] = None
    disable_console: A[
        bool, option("Don't serve the page /console: chat, figures, running requests and options.")
    ] = False
    ssl_certfile: A[
        str | None, option("PEM file with the certificate and those that signed it: serves HTTPS and HTTP/2.")
    ] = None
    ssl_keyfile: A[
        str | None, option("PEM file with the certificate's key, where it is not in --ssl-certfile.")
    ] = None
    ssl_keyfile_password: A[str | None, option("Password of that key.", secret=True)] = None
    ssl_ca_certs: A[
        str | None, option("PEM file of authorities; clients must show a certificate of one of them.")
    ] = None
    enable_h2c: A[
        bool, option("Speak HTTP/2 without TLS too, to clients that begin with it or ask for an upgrade.")
    ] = False
    grpc_mode: A[bool, option("Serve gRPC (runtime/rpc/runtime.proto) instead of HTTP.")] = False
    skip_server_warmup: A[
        bool,
        superseded(
            "Don't send the warm-up request after start.",
            "the server sends none: a rank is ready when it says so.",
        ),
    ] = False
    warmups: A[
        str | None,
        option("Warm-ups to run before the server is ready, with commas: generate, prefill, grammar."),
    ] = None
    stream_interval: A[
        Count,
        option("Tokens of a sequence between two chunks of its stream; the first one goes out at once."),
    ] = 1
    stream_output: A[bool, option("Native streams carry new text only, not all of it so far.")] = False


class HttpPlan(Http, frozen=True, kw_only=True):
    """The HTTP server in force."""

    max_total_body_bytes: int
    max_connections: int


class Api(Group, frozen=True, kw_only=True):
    """API"""

    api_key: A[
        tuple[str, ...] | str | None,
        option("Keys, one of which clients must send as a bearer token; each is a tenant.", secret=True),
    ] = None
    api_key_file: A[
        str | None,
        option(
            "File of tenants, a line each: a name and its keys. SIGHUP reads it again.",
            note="with such a file, or several keys, a tenant sees only the files, batches, responses, "
            "sessions and adapters that are its own",
        ),
    ] = None
    tenant_quota: A[
        Fraction, option("Largest part of each limit on what is kept that one of several tenants may take.")
    ] = 0.25
    admin_api_key: A[
        str | None, option("Key for the routes that change the server for everybody.", secret=True)
    ] = None
    served_model_name: A[str, option("Name that clients use; auto is --model-path as given.")] = "auto"
    chat_template: A[
        str,
        option(
            "Chat template: a name (chatml, llama-3, ...), a Jinja file, or a conversation template in JSON; "
            "auto: the model's."
        ),
    ] = "auto"
    hf_chat_template_name: A[
        str | None, option("Which of several named templates of the tokenizer to use.")
    ] = None
    completion_template: A[
        str,
        option(
            "Format of prompts with a `suffix`: a name or a file.",
            note="star_coder, deepseek_coder, qwen_coder, codestral, or a file with {prefix} and {suffix}; "
            "auto: by the tokens",
        ),
    ] = "auto"
    file_storage_path: A[
        str | None,
        option(
            "Folder for files and batches of clients.",
            note="the reference writes to the folder sglang_storage unasked",
        ),
    ] = None
    file_storage_bytes: A[Count, option("Most bytes of files that are kept.")] = 16 * 2**30
    enable_cache_report: A[
        bool,
        option(
            "Say in `usage` where cached prompt tokens came from: device, host or storage.",
            note="how many there are it always says",
        ),
    ] = False
    reasoning_parser: A[
        str,
        option(
            "How reasoning is separated from the answer: a format of docs/tools.md, or none.",
            note="auto: as the chat template shows",
        ),
    ] = "auto"
    tool_call_parser: A[
        str,
        option(
            "How tool calls are read out of the answer: a format of docs/tools.md, or none.",
            note="auto: as the chat template shows",
        ),
    ] = "auto"
    tool_server: A[
        str | None,
        refused(
            "MCP servers whose tools the server itself calls within an answer of /v1/responses, or demo.",
            "clients run tools here: the calls of a model are function_call items of /v1/responses, "
            "and their results come back as "
            "function_call_output. The reference reaches these servers over plain HTTP without a key and "
            "runs what a model asks for with "
            "the server's own rights; its demo sends queries to a search service and code to Docker",
        ),
    ] = None
    sampling_defaults: A[
        Literal["openai", "model"],
        option(
            "Take sampling values that a request leaves open from the model's generation_config.json, or "
            "from OpenAI's."
        ),
    ] = "model"
    unknown_fields: A[
        Literal["refuse", "warn"],
        option(
            "Fields of a request that are not known: answer 400, or ignore them with a warning header and a "
            "log line.",
            note="Ollama's routes always ignore them",
        ),
    ] = "refuse"
    max_logprobs: A[
        MaxLogprobs,
        option(
            "Most alternatives that a request may ask for at each token; -1: as many as ranks return, 1024."
        ),
    ] = 20
    preferred_sampling_params: A[
        Json | None, option("Sampling values for requests that leave them open, as JSON.")
    ] = None
    allow_auto_truncate: A[
        bool, option("Cut the end off prompts that are too long instead of refusing them.")
    ] = False
    enable_custom_logit_processor: A[
        bool,
        option(
            "Let requests choose one of --logit-processors.",
            note="the reference runs code that comes with the request, as a pickle; here requests name code "
            "of the server",
        ),
    ] = False
    logit_processors: A[list[str], option("Classes that change logits, as package.module:Class.")] = []
    enable_return_hidden_states: A[bool, option("Let requests ask for hidden states of the last layer.")] = (
        False
    )
    enable_return_routed_experts: A[bool, option("Let requests ask which experts computed their tokens.")] = (
        False
    )
    constrained_json_whitespace_pattern: A[
        str | None,
        option("Pattern of the whitespace that constrained JSON may have; of llguidance and outlines."),
    ] = None
    constrained_json_disable_any_whitespace: A[
        bool, option("Constrained JSON has no optional whitespace.")
    ] = False
    disable_jump_forward: A[
        bool,
        option(
            "Sample tokens one by one also where the grammar of a request forces them; the text is the same."
        ),
    ] = False
    tree_decode_config: A[
        str | None,
        option(
            "JSON file of the sequences of tokens that answers may be.",
            note="RTP-LLM's format; a name alone is in the model's folder; see structured.md",
        ),
    ] = None
    grammar_timeout: A[
        Seconds, option("Seconds that compiling a grammar may take; a request that needs more is refused.")
    ] = 10.0
    multi_item_scoring_delimiter: A[
        Whole | None,
        option(
            "Any token id: /v1/score reads query and items apart, and computes the query once for all of "
            "them.",
            note="the reference puts this token between them; here items share the pages of the query, and "
            "no token is needed",
        ),
    ] = None


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable from this machine only."""
    if host in ALL_INTERFACES:
        return False
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def max_total_body_bytes(max_body_bytes: int) -> Derived:
    """Room for a few of the largest bodies, and for many of a usual size."""
    if 2 * max_body_bytes > LEAST_TOTAL_BODY_BYTES:
        return Derived(2 * max_body_bytes, "two of --max-body-bytes")
    return Derived(LEAST_TOTAL_BODY_BYTES, f"{LEAST_TOTAL_BODY_BYTES // max_body_bytes} of --max-body-bytes")


def other_files(num_ranks: int) -> int:
    """Open files that the process needs for everything else: health checks, ranks, storage."""
    return OTHER_FILES + FILES_OF_A_RANK * num_ranks


def max_connections(open_files: int, num_ranks: int) -> Derived:
    """The open files that the process may have, less those that it needs for everything else."""
    others = other_files(num_ranks)
    if open_files - others >= MOST_CONNECTIONS:
        return Derived(MOST_CONNECTIONS, "each may hold some 200 KiB")
    return Derived(
        max(LEAST_CONNECTIONS, open_files - others),
        f"the process may open {open_files} files (ulimit -Hn) and needs {others} for itself",
    )


def allowed_hosts(host: str, has_keys: bool) -> Derived:
    """Only a keyless server on this machine trusts everything that reaches it, and so must know by which name
    that came."""
    if has_keys:
        return Derived(("*",), "clients need a key")
    if not is_loopback(host):
        return Derived(("*",), "the server listens for other machines, whose names for it are not known")
    return Derived(tuple(dict.fromkeys(("localhost", host))), "a server without keys on this machine")


def served_model_name(model_path: str) -> Derived:
    """The served name is --model-path as given."""
    return Derived(model_path, "clients name the model as --model-path does")
