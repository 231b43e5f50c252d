"""Every route in words: what it does, the body it takes, and an example. The OpenAPI document is made of this
and the bodies' types."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from runtime.http.admin import adapters
from runtime.http.admin import control as admin
from runtime.http.admin import expert_load as experts
from runtime.http.admin import memory_saver as memory_saver
from runtime.http.anthropic import message_request as anthropic
from runtime.http.embeddings.embeddings import EmbeddingBody, EncodeBody
from runtime.http.embeddings.scores import ClassifyBody, RerankBody, ScoreBody
from runtime.http.native import info, parse
from runtime.http.native.generate_request import GenerateBody
from runtime.http.ollama import ollama_request as ollama
from runtime.http.ollama.embed import EmbedBody, EmbeddingsBody
from runtime.http.openai import completion_request as openai
from runtime.http.openai.batches import BatchBody
from runtime.http.openai.responses.response_request import ResponseBody

Json = Mapping[str, Any]
# sse and ndjson: where the body asks for a stream, else json
Answer = Literal["json", "sse", "ndjson", "text", "binary", "html"]


class Operation(Struct, frozen=True):
    """One route. `methods` and `path` are those of the route; several methods do the same."""

    methods: str
    path: str
    summary: str
    body: type[Struct] | None = None
    example: Json = {}
    answer: Answer = "json"
    form: bool = False  # the body is a form with a file
    query: tuple[str, ...] = ()


HI = [{"role": "user", "content": "Hello!"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": CITY}
PAGE = ("after", "limit", "order")

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "OpenAI": (
        Operation(
            "POST",
            "/v1/chat/completions",
            "Answer a conversation",
            openai.ChatBody,
            {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 16},
            "sse",
        ),
        Operation(
            "POST",
            "/v1/completions",
            "Continue a text",
            openai.CompletionBody,
            {"prompt": "Once upon a time", "max_tokens": 16},
            "sse",
        ),
        Operation(
            "POST",
            "/v1/responses",
            "Answer a conversation of items, and keep the answer",
            ResponseBody,
            {"input": "Hello!", "max_output_tokens": 16},
            "sse",
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            "Count the tokens of what would be asked",
            ResponseBody,
            {"input": "Hello!"},
        ),
        Operation(
            "GET",
            "/v1/responses/{id}",
            "A kept answer, or its events, where it was made in the background as a stream",
            query=("stream", "starting_after"),
        ),
        Operation("DELETE", "/v1/responses/{id}", "Forget a kept answer"),
        Operation("POST", "/v1/responses/{id}/cancel", "Stop an answer in the background"),
        Operation("GET", "/v1/responses/{id}/input_items", "What a kept answer was asked with", query=PAGE),
        Operation("GET", "/v1/models", "The served model, as a list"),
        Operation("GET", "/v1/models/{name}", "The served model"),
        Operation("POST", "/v1/files", "Keep a file (--file-storage-path)", form=True),
        Operation("GET", "/v1/files", "The kept files", query=("purpose", *PAGE)),
        Operation("GET", "/v1/files/{id}", "A kept file"),
        Operation("DELETE", "/v1/files/{id}", "Delete a file"),
        Operation("GET", "/v1/files/{id}/content", "The bytes of a file", answer="binary"),
        Operation(
            "POST",
            "/v1/batches",
            "Answer the requests of a file in idle time",
            BatchBody,
            {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        ),
        Operation("GET", "/v1/batches", "The batches", query=("after", "limit")),
        Operation("GET", "/v1/batches/{id}", "A batch"),
        Operation("POST", "/v1/batches/{id}/cancel", "Stop a batch"),
    ),
    "Anthropic": (
        Operation(
            "POST",
            "/v1/messages",
            "Answer a conversation",
            anthropic.MessagesBody,
            {"model": "default", "max_tokens": 16, "messages": HI},
            "sse",
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "Count the tokens of what would be asked",
            anthropic.CountBody,
            {"model": "default", "messages": HI},
        ),
    ),
    "Ollama": (
        Operation(
            "POST",
            "/api/chat",
            "Answer a conversation",
            ollama.ChatBody,
            {"model": "default", "messages": HI, "options": {"num_predict": 16}},
            "ndjson",
        ),
        Operation(
            "POST",
            "/api/generate",
            "Answer a prompt",
            ollama.GenerateBody,
            {"model": "default", "prompt": "Hello!", "options": {"num_predict": 16}},
            "ndjson",
        ),
        Operation(
            "POST", "/api/embed", "Embeddings of texts", EmbedBody, {"model": "default", "input": ["Hello!"]}
        ),
        Operation(
            "POST",
            "/api/embeddings",
            "The embedding of a text, in an older form",
            EmbeddingsBody,
            {"model": "default", "prompt": "Hello!"},
        ),
        Operation("GET", "/api/tags", "The served model, as a list"),
        Operation("GET", "/api/ps", "The served model, which is loaded"),
        Operation("GET", "/api/version", "Version of this server"),
        Operation("POST", "/api/show", "About the served model", ollama.NamedBody, {"model": "default"}),
        *[
            Operation(method, path, "Refused: this server has one model, chosen when it starts")
            for method, path in (
                ("POST", "/api/pull"),
                ("POST", "/api/push"),
                ("POST", "/api/create"),
                ("POST", "/api/copy"),
                ("DELETE", "/api/delete"),
                ("POST", "/api/blobs/{digest}"),
            )
        ],
    ),
    "Native": (
        Operation(
            "POST PUT",
            "/generate",
            "Continue one or several texts",
            GenerateBody,
            {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
            "sse",
        ),
        *[
            Operation(
                "POST",
                prefix + "/tokenize",
                "Token ids of texts, or of a conversation",
                info.TokenizeBody,
                {"prompt": "Hello!"},
            )
            for prefix in ("", "/v1")
        ],
        *[
            Operation(
                "POST",
                prefix + "/detokenize",
                "The text of tokens",
                info.DetokenizeBody,
                {"tokens": [1, 2, 3]},
            )
            for prefix in ("", "/v1")
        ],
        Operation(
            "POST",
            "/parse_function_call",
            "Tool calls in a text",
            parse.CallBody,
            {"text": "Hello!", "tools": [], "tool_call_parser": "hermes"},
        ),
        Operation(
            "POST",
            "/separate_reasoning",
            "Thoughts in a text",
            parse.ReasoningBody,
            {"text": "Hello!", "reasoning_parser": "qwen3"},
        ),
        *[Operation("GET", path, "About the served model") for path in ("/get_model_info", "/model_info")],
        *[
            Operation("GET", path, "Options in force, and the server's state")
            for path in ("/server_info", "/get_server_info")
        ],
        Operation("GET", "/version", "Version of this server"),
        Operation("GET", "/v1/loads", "How busy it is"),
        Operation("GET", "/get_load", "How busy it is, in an older form"),
        Operation(
            "GET POST",
            "/open_session",
            "Begin a session: requests that go on from each other",
            admin.OpenSessionBody,
            {"capacity_of_str_len": 1000},
        ),
        Operation("GET POST", "/close_session", "End a session", admin.CloseSessionBody, {"session_id": "s"}),
    ),
    "Vectors": (
        Operation("POST", "/v1/embeddings", "Vectors of texts", EmbeddingBody, {"input": "Hello!"}),
        Operation(
            "POST PUT",
            "/encode",
            "Vectors or plain scores of texts, in SGLang's form",
            EncodeBody,
            {"text": "Hello!"},
        ),
        Operation(
            "POST",
            "/pooling",
            "What the model makes of texts, in vLLM's form",
            EmbeddingBody,
            {"input": "Hello!"},
        ),
        *[
            Operation(
                "POST",
                prefix + "/score",
                "How two texts go together, or how likely labels follow query and item",
                ScoreBody,
                {"text_1": "A fruit", "text_2": ["apple", "truck"]},
            )
            for prefix in ("", "/v1")
        ],
        *[
            Operation(
                "POST",
                prefix + "/rerank",
                "Documents in the order in which they answer a query",
                RerankBody,
                {"query": "A fruit", "documents": ["apple", "truck"]},
            )
            for prefix in ("", "/v1", "/v2")
        ],
        *[
            Operation("POST", prefix + "/classify", "Classes of texts", ClassifyBody, {"input": "Hello!"})
            for prefix in ("", "/v1")
        ],
    ),
    "Health": (
        Operation("GET", "/health", "Whether it serves"),
        Operation("GET", "/ping", "Whether it serves"),
        Operation("GET", "/", "Whether anybody is there", answer="text"),
        Operation("GET", "/health_generate", "Whether it serves, by generating a token"),
        Operation("GET", "/metrics", "Figures for Prometheus", answer="text"),
        Operation("GET", "/openapi.json", "This document"),
        Operation("GET", "/docs", "This document, to read and try", answer="html"),
    ),
    "Control": (
        Operation(
            "POST",
            "/pause_generation",
            "Plan no steps until told to go on",
            admin.PauseBody,
            {"mode": "in_place"},
        ),
        Operation("POST", "/continue_generation", "Go on"),
        Operation("GET POST", "/flush_cache", "Empty the prefix cache", answer="text"),
        Operation("GET POST", "/clear_hicache_storage_backend", "Empty the storage tier", answer="text"),
        Operation(
            "POST",
            "/abort_request",
            "End requests by the beginning of their ids",
            admin.AbortBody,
            {"rid": "x"},
        ),
        Operation(
            "GET POST",
            "/release_memory_occupation",
            "Give the ranks' memory back",
            memory_saver.OccupationBody,
            {"tags": ["kv_cache"]},
        ),
        Operation(
            "GET POST",
            "/resume_memory_occupation",
            "Take it again",
            memory_saver.OccupationBody,
            {"tags": ["kv_cache"]},
        ),
        Operation(
            "POST",
            "/update_weights_from_disk",
            "Other weights of the same model",
            memory_saver.UpdateBody,
            {"model_path": "/models/x"},
        ),
        Operation(
            "POST",
            "/load_lora_adapter",
            "Load an adapter",
            adapters.LoadBody,
            {"lora_name": "x", "lora_path": "/adapters/x"},
        ),
        Operation(
            "POST",
            "/unload_lora_adapter",
            "Unload an adapter, when its requests have ended",
            adapters.UnloadBody,
            {"lora_name": "x"},
        ),
        Operation(
            "POST",
            "/v1/load_lora_adapter",
            "The same, as vLLM has it",
            adapters.LoadBody,
            {"lora_name": "x", "lora_path": "/adapters/x"},
            "text",
        ),
        Operation(
            "POST",
            "/v1/unload_lora_adapter",
            "The same, as vLLM has it",
            adapters.UnloadBody,
            {"lora_name": "x"},
            "text",
        ),
        Operation(
            "GET POST",
            "/start_profile",
            "Record where the ranks' time goes",
            admin.ProfileBody,
            {"num_steps": 5},
        ),
        Operation("GET POST", "/stop_profile", "Write what was recorded"),
        Operation("GET POST", "/start_expert_distribution_record", "Record how tokens spread over experts"),
        Operation("GET POST", "/stop_expert_distribution_record", "Stop recording that"),
        Operation(
            "GET POST",
            "/dump_expert_distribution_record",
            "Write what was recorded of experts, and forget it",
            experts.DumpBody,
        ),
    ),
}
